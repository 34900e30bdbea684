"""A server's settings, checked once; every error names its field."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from octavo.errors import ConfigError

KEY_VARIABLE = "OCTAVO_API_KEY"

# field -> (lowest, highest); None is allowed where it is the default
_RANGES: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "max_waiting": (0, 10**6),
    "max_waiting_tokens": (1, 10**12),
    "request_timeout": (0.001, 10**7),
    "drain_timeout": (0, 10**6),
    "stall_limit": (0.001, 10**6),
    "max_body": (1024, 2**31),
    "max_prompts": (1, 10**5),
    "max_n": (1, 1024),
    "max_stops": (0, 64),
    "max_logprobs": (0, 1000),
    "max_sessions": (0, 10**6),
    "session_idle": (1, 10**7),
}


@dataclass(frozen=True)
class ServerSettings:
    """How a server is set up.

    - ``host``, ``port``: where it listens; an address beyond this machine needs keys, or ``allow_anyone``
    - ``served_model_name``: what clients call the model; None: its name, or the name of its file
    - ``api_key_file``: a file with one key a line, or "NAME KEY"; the environment's OCTAVO_API_KEY counts too
    - ``allowed_hosts``: names besides loopback ones and addresses that the Host header may hold; "*" is any
    - ``cors_origins``: web origins whose pages may call; none by default
    - ``max_waiting``: sequences that may wait beside the ``max_running`` that run; ``max_waiting_tokens``: prompt
      tokens that may wait; what goes beyond is refused with 429
    - ``request_timeout``: seconds that a request may take; None: no limit
    - ``drain_timeout``: seconds that running requests get when the server is told to stop
    - ``stall_limit``: seconds without a finished step after which health says stuck
    - ``max_body``: bytes of a request's body; ``max_prompts``: prompts in a request; ``max_n``: answers to a prompt;
      ``max_stops``: stop strings; ``max_logprobs``: log-probabilities a token
    - ``max_sessions``: sessions at a time; ``session_idle``: seconds after which an unused one is deleted
    - ``access_log``: "json" (one line a request, on stderr) or "off"; ``log_prompts``: whether it tells prompts
    - ``record``: a file that each whole answer is appended to, with its request: receipts for ``octavo replay``
    - ``tool_format``: the model's way of writing tool calls; None: found from its chat template
    - ``reasoning``: "auto" (apart, where the model's template knows think tags) or "off"
    - ``map``: what the live map shows: "off", "shape" or "text"; None: text on loopback or with keys, else shape
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_key_file: str | None = None
    allow_anyone: bool = False
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_waiting: int = 256
    max_waiting_tokens: int = 1_000_000
    request_timeout: float | None = None
    drain_timeout: float = 30.0
    stall_limit: float = 60.0
    max_body: int = 8 << 20
    max_prompts: int = 1024
    max_n: int = 128
    max_stops: int = 16
    max_logprobs: int = 20
    max_sessions: int = 1024
    session_idle: float = 600.0
    access_log: str = "json"
    log_prompts: bool = False
    record: str | None = None
    tool_format: str | None = None
    reasoning: str = "auto"
    map: str | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is None and name == "request_timeout":
                continue
            kinds = (int, float) if name.endswith(("timeout", "limit", "idle")) else (int,)
            if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
                raise ConfigError(f"{name} must be a number in [{low:g}, {high:g}], not {value!r}", name)
        for name in ("allowed_hosts", "cors_origins"):
            object.__setattr__(self, name, tuple(getattr(self, name) or ()))
        for name, allowed in (
            ("access_log", ("json", "off")),
            ("reasoning", ("auto", "off")),
            ("map", ("off", "shape", "text")),
        ):
            if getattr(self, name) not in (*allowed, *((None,) if name == "map" else ())):
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}", name)

    def keys(self, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Names of users by key: from the file, and from the environment (several keys apart by commas)."""
        keys: dict[str, str] = {}
        if self.api_key_file is not None:
            try:
                lines = Path(self.api_key_file).read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"api_key_file {self.api_key_file} cannot be read: {error}", "api_key_file") from None
            for line in lines:
                if line.strip() and not line.lstrip().startswith("#"):
                    self._add(keys, line.split(), f"a line of {self.api_key_file}")
            if not keys:
                raise ConfigError(f"api_key_file {self.api_key_file} holds no key", "api_key_file")
        for text in environment.get(KEY_VARIABLE, "").split(","):
            if text.strip():
                self._add(keys, [text.strip()], KEY_VARIABLE)
        return keys

    @staticmethod
    def _add(keys: dict[str, str], words: list[str], where: str) -> None:
        name, key = (f"key-{len(keys) + 1}", words[0]) if len(words) == 1 else (words[0], words[-1])
        if len(words) > 2 or not re.fullmatch(r"[\x21-\x7e]{8,512}", key):
            raise ConfigError(f"{where} holds no key of 8 to 512 printable characters, or more than a name and a key")
        keys[key] = name

    @property
    def local(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False
