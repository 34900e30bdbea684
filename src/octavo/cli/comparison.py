"""Where two answers differ first."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

# Names and times of an answer, which are new each time, and what the prefix cache happened to hold.
_BESIDE = frozenset(
    ("id", "call_id", "item_id", "created", "created_at", "completed_at", "object", "model", "system_fingerprint")
    + ("cached_tokens", "prompt_tokens_details", "input_tokens_details", "timings")
)
_LISTS = ("logprobs", "top_logprobs", "prompt_logprobs")  # in these a name may be a token's text
_AROUND = 24  # characters shown on both sides


class Difference(NamedTuple):
    """``place``: such as ``choices[0].text, byte 17``; ``before``, ``now``: what stands there."""

    place: str
    before: str
    now: str


def first_difference(before: Any, now: Any, strict: bool, place: str = "", beside: bool = True) -> Difference | None:
    """None if the answers are the same, numbers exactly.

    ``strict``: fields that only the new answer has are a difference, too; ``beside``: whether names are passed over
    that are new each time.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        names = [*before, *(name for name in now if strict and name not in before)]
        for name in names:
            if beside and name in _BESIDE:
                continue
            where = f"{place}.{name}" if place else name
            inner = beside and name not in _LISTS
            found = first_difference(before.get(name), now.get(name), strict, where, inner)
            if found is not None:
                return found
        return None
    if isinstance(before, list) and isinstance(now, list):
        for i, (old, new) in enumerate(zip(before, now, strict=False)):
            found = first_difference(old, new, strict, f"{place}[{i}]", beside)
            if found is not None:
                return found
        if len(before) != len(now):
            return Difference(place, f"{len(before)} entries", f"{len(now)} entries")
        return None
    if isinstance(before, str) and isinstance(now, str):
        return None if before == now else _texts(place, before, now)
    if before == now and isinstance(before, bool) == isinstance(now, bool):
        return None
    return Difference(place, _shown(before), _shown(now))


def _texts(place: str, before: str, now: str) -> Difference:
    common = next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), min(len(before), len(now)))
    byte = len(before[:common].encode("utf-8", "surrogatepass"))
    return Difference(f"{place}, byte {byte}", _around(before, common), _around(now, common))


def _around(text: str, at: int) -> str:
    """The text on both sides of a place; two texts that are equal up to it have it in the same column."""
    start, end = max(0, at - _AROUND), at + _AROUND
    inside = json.dumps(text[start:end], ensure_ascii=not text[start:end].isprintable())
    return f"{'...' if start else ''}{inside}{'...' if end < len(text) else ''}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
