"""Stop strings over streamed text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.errors import RequestError


class StopResult(NamedTuple):
    """``text``: what may be shown now.  ``stop``: the stop string that ended the output, or ``None``."""

    text: str
    stop: str | None


class StopChecker:
    """Owns the end of an output's text that may yet turn out to begin a stop string.

    Promises: the earliest match wins: the stop string that is complete first, and of those complete at the same
    character the one that began first.  Thus the result depends on the text alone, not on how it was cut into tokens.
    No character of that match is ever given out (with ``include_stop`` all of it is), nor anything after it.
    Matches complete before output token number ``min_tokens`` don't count; that text is given out like any other.

    Knuth, Morris and Pratt (1977), one automaton a stop string: constant work for each character.
    """

    def __init__(self, stops: Sequence[str], min_tokens: int = 0, include_stop: bool = False) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise RequestError("stop must be a list of texts that are not empty.", field="stop")
        self._stops = list(dict.fromkeys(stops))
        self._fails = [_failures(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # how many characters of each stop the text ends with
        self._min_tokens = min_tokens
        self._include = include_stop
        self._held = ""
        self.stop: str | None = None

    def push(self, text: str, tokens: int) -> StopResult:
        """Takes new text; ``tokens``: how many output tokens there are, the one that brought it included."""
        if self.stop is not None:
            return StopResult("", self.stop)
        if not self._stops:
            return StopResult(text, None)
        counts = tokens >= self._min_tokens
        pending = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            complete = self._advance(char)
            if complete is not None and counts:
                self.stop, self._held = complete, ""
                return StopResult(pending[: end if self._include else end - len(complete)], complete)
        keep = max(self._matched)
        cut = len(pending) - keep
        self._held = pending[cut:]
        return StopResult(pending[:cut], None)

    def flush(self) -> str:
        """What was held back, once no text follows."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """Feeds one character to every automaton; the longest stop that it completes."""
        complete: str | None = None
        for index, stop in enumerate(self._stops):
            fails, size = self._fails[index], self._matched[index]
            while size and stop[size] != char:
                size = fails[size - 1]
            size += stop[size] == char
            if size == len(stop):
                if complete is None or len(stop) > len(complete):
                    complete = stop
                size = fails[size - 1]
            self._matched[index] = size
        return complete


def _failures(stop: str) -> list[int]:
    """For each prefix of ``stop``, how long its longest proper prefix is that is also its suffix."""
    fails = [0] * len(stop)
    size = 0
    for at in range(1, len(stop)):
        while size and stop[size] != stop[at]:
            size = fails[size - 1]
        size += stop[size] == stop[at]
        fails[at] = size
    return fails
