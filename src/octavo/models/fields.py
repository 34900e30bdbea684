"""Typed reads of a model's description: ``config.json`` or GGUF metadata, neither of which is trusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from octavo.errors import ModelError

T = TypeVar("T")

MAX_COUNT = 1 << 31  # no width, length or count of a real model is larger


class Fields:
    """Owns: nothing; reads a mapping under an optional key prefix (GGUF's ``llama.``).

    Promises: every value has the type and range that was asked for, else a :class:`ModelError` names file and field.
    """

    def __init__(self, source: str, values: Mapping[str, Any], prefix: str = "") -> None:
        self.source = source
        self.values = values
        self.prefix = prefix

    def fail(self, key: str, why: str) -> ModelError:
        return ModelError(f"{self.source}: {self.prefix}{key} {why}")

    def refuse(self, what: str) -> ModelError:
        return ModelError(f"{self.source}: {what}, which Octavo doesn't support")

    def has(self, key: str) -> bool:
        return self.values.get(self.prefix + key) is not None

    def raw(self, key: str, default: Any = None) -> Any:
        value = self.values.get(self.prefix + key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = MAX_COUNT) -> int:
        """An integer in [low, high]."""
        value = self._need(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"must be an integer, not {value!r:.80}")
        if not low <= value <= high:
            raise self.fail(key, f"is {value}, outside {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None, low: float = 0.0, high: float = 1e12) -> float:
        """A finite number in (low, high]."""
        value = self._need(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(key, f"must be a number, not {value!r:.80}")
        if not low < value <= high:  # a NaN is in no range
            raise self.fail(key, f"is {value}, outside {low:g} to {high:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        return self._typed(key, default, bool, "true or false")

    def text(self, key: str, default: str | None = None) -> str:
        return self._typed(key, default, str, "a string")

    def items(self, key: str) -> list[Any] | None:
        """A list, or None when absent."""
        return self._typed(key, [], list, "a list") if self.has(key) else None

    def inner(self, key: str) -> Fields:
        """A nested object; empty when absent."""
        return Fields(f"{self.source}: {self.prefix}{key}", self._typed(key, {}, dict, "an object"))

    def _need(self, key: str, default: T | None) -> T:
        value = self.raw(key, default)
        if value is None:
            raise self.fail(key, "is missing")
        found: T = value
        return found

    def _typed(self, key: str, default: T | None, kind: type, words: str) -> T:
        value = self._need(key, default)
        if not isinstance(value, kind):
            raise self.fail(key, f"must be {words}, not {value!r:.80}")
        return value
