"""What a load is made of: every setting of ``octavo bench serve``."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from octavo.errors import ConfigError


@dataclass(frozen=True)
class LoadConfig:
    """Owns: one load's settings.  Promises: checked when made; ConfigError names the field.

    ``rate`` or ``trace`` make an open loop, requests that come when they come; otherwise it is a closed one of
    ``concurrency`` requests, where one comes when another ends.
    """

    model: str | None = None
    requests: int | None = None
    duration: float | None = None
    concurrency: int | None = None
    rate: float | None = None
    trace: str | None = None
    speed: float = 1.0
    scale: float = 1.0
    prompt: int = 128
    output: int = 64
    spread: float = 0.0
    context: int | None = None
    prefixes: int = 0
    prefix_tokens: int = 256
    prefix_share: float = 1.0
    chat: bool = False
    token_ids: bool = False
    vocab: int | None = None
    ignore_eos: bool = True
    extra: str | None = None
    api_key: str | None = None
    goodput: str | None = None
    warmup: int = 1
    time_limit: float = 600.0
    seed: int = 0
    json: str | None = None
    plots: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("rate", "concurrency", "trace") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} are different kinds of load: give one of them", given[1])
        for name in ("requests", "concurrency", "prompt", "output", "prefix_tokens", "vocab"):
            self._at_least(name, 1)
        self._at_least("context", 2)
        for name in ("prefixes", "warmup", "spread"):
            self._at_least(name, 0)
        for name in ("duration", "rate", "speed", "scale", "time_limit"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be above 0, not {value:g}", name)
        if not 0 <= self.prefix_share <= 1:
            raise ConfigError(f"prefix_share must be in [0, 1], not {self.prefix_share:g}", "prefix_share")
        if self.chat and self.token_ids:
            raise ConfigError("chat sends messages, which are text: token_ids can't be with it", "token_ids")
        self.body()

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is not None and not least <= value < math.inf:
            raise ConfigError(f"{name} must be at least {least}, not {value}", name)

    def body(self) -> dict[str, Any]:
        """Further fields of each request."""
        try:
            extra = json.loads(self.extra or "{}")
        except ValueError as error:
            raise ConfigError(f"extra is no JSON: {error}", "extra") from None
        if not isinstance(extra, dict):
            raise ConfigError('extra must be a JSON object, such as {"top_k": 40}', "extra")
        return {**({"ignore_eos": True} if self.ignore_eos else {}), **extra}

    @property
    def places(self) -> int | None:
        """Of the closed loop; None: the loop is open."""
        return None if self.rate is not None or self.trace is not None else self.concurrency or 16

    @property
    def count(self) -> int | None:
        """How many requests; None: as many as come, within ``duration`` or in the trace."""
        return 64 if (self.requests, self.duration, self.trace) == (None, None, None) else self.requests
