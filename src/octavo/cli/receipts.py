"""Receipts as they lie in files: JSON, or JSON lines, written by a server or by hand."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.server.joining import JOINERS

# What decides when and for whom a request runs, and never what it answers; a slower machine may take longer.
_BESIDE = ("timeout", "priority", "model")


@dataclass(frozen=True)
class Receipt:
    """A request and the answer that it got.

    - ``number``: its place in the file, from 1; ``whole``: whether a server wrote it, so that nothing was left out
    - ``filled``: what the request left open, as the server filled it
    - ``settings``: the server's, where they decide how an answer is told
    """

    number: int
    path: str
    request: dict[str, Any]
    response: dict[str, Any]
    filled: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    fingerprint: str | None = None
    model: str | None = None
    name: str = ""
    whole: bool = False

    def body(self, model: str) -> dict[str, Any]:
        """The request to be sent again, with nothing left to chance."""
        return {**{k: v for k, v in self.request.items() if k not in _BESIDE}, **self.filled, "model": model}

    @property
    def chancy(self) -> bool:
        """Whether the answer may have been drawn with a seed that the receipt doesn't tell."""
        asked = {**self.request, **self.filled}
        drawn = asked.get("temperature") != 0 and not asked.get("use_beam_search")
        return drawn and asked.get("seed") is None and not asked.get("seeds")


def read(file: str) -> tuple[list[Receipt], list[str]]:
    """Receipts of a file (``-`` is stdin) in order, and notes on lines that were passed over.  Raises ConfigError."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} can't be read: {getattr(error, 'strerror', None) or error}", "file") from None
    values, notes = _values(text)
    if not values:
        raise ConfigError(f"{file} holds no receipts" + (f": {notes[0]}" if notes else ""), "file")
    return [_receipt(number, value) for number, value in enumerate(values, 1)], notes


def _values(text: str) -> tuple[list[Any], list[str]]:
    try:
        whole = json.loads(text)
        return (whole if isinstance(whole, list) else [whole]), []
    except ValueError:
        pass
    values, notes = [], []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                values.append(json.loads(line))
            except ValueError:
                notes.append(f"line {number} is cut off, or no JSON: passed over")
    return values, notes


def _receipt(number: int, value: Any) -> Receipt:
    def take(name: str, kind: type, default: Any) -> Any:
        found = value.get(name)
        if found is None and default is not None:
            return default
        if not isinstance(found, kind):
            raise ConfigError(f"receipt {number}: {name} is missing, or not what it should be", "file")
        return found

    if not isinstance(value, dict):
        raise ConfigError(f"receipt {number} is no JSON object", "file")
    path = take("path", str, None)
    if path not in JOINERS:
        raise ConfigError(f"receipt {number}: only {', '.join(JOINERS)} can be replayed, not {path!r}", "file")
    response = value.get("response")
    if isinstance(response, list):  # a stream's chunks, as its client got them
        try:
            response = JOINERS[path](response)
        except (LookupError, TypeError, AttributeError):
            raise ConfigError(f"receipt {number}: response holds no chunks of a stream of {path}", "file") from None
    if not isinstance(response, dict) or not isinstance(response.get("choices", response.get("output")), list):
        raise ConfigError(f"receipt {number}: response is no answer of {path}", "file")
    named = value.get("system_fingerprint") or response.get("system_fingerprint")
    model = value.get("model") or response.get("model")
    return Receipt(
        number,
        path,
        take("request", dict, None),
        response,
        take("filled", dict, {}),
        take("settings", dict, {}),
        named if isinstance(named, str) else None,
        model if isinstance(model, str) else None,
        str(value.get("request_id") or response.get("id") or ""),
        "octavo" in value,
    )


def chosen(receipts: Sequence[Receipt], only: Sequence[int]) -> list[Receipt]:
    """Those of some numbers, all without any.  Raises ConfigError."""
    for number in only:
        if not 1 <= number <= len(receipts):
            raise ConfigError(f"--only {number}: the file holds receipts 1 to {len(receipts)}", "only")
    return [receipt for receipt in receipts if not only or receipt.number in only]
