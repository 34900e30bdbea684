"""Prompt lookup: drafts of what comes next, found in what a sequence holds already.

Summaries, edits and extractions repeat runs of their prompt.  Where the last few tokens have been seen before, what
followed them then is drafted to follow now (Yang et al., "Inference with Reference", 2023; Saxena, "Prompt lookup
decoding", 2023).  Drafts are verified all in one row; wrong ones cost time and change nothing.
"""

from __future__ import annotations

from array import array

from octavo.core.plan import NO_TOKENS
from octavo.core.sequence import Sequence

SIZES = (4, 3, 2)  # tokens of the runs that are remembered, the longest looked for first

# What one more token costs a step, in steps of one token: 0.07 (Gemma 3 270M) to 0.28 (SmolLM2-135M) on two cores.
COST = 0.3

# (length of a match, how likely the token that followed it comes next), until a sequence has shown better.
LEVELS = ((2, 0.3), (3, 0.5), (4, 0.65), (8, 0.85), (16, 0.9))
WEIGHT = 0.15  # of the latest token in what a sequence has shown


class Lookup:
    """Owns: where runs of a sequence's tokens were seen last, which place its end repeats now, and how far such
    repeats have been right.

    Promises: constant work for each token.  Every token of the output is compared with the one that followed at the
    place that was repeated, whether it was drafted or not; so what is known of the chances of drafts costs no drafts,
    and text that repeats nothing soon has none.
    """

    __slots__ = ("_seen", "_read", "_source", "_length", "_chances")

    def __init__(self) -> None:
        self._seen: tuple[dict[bytes, int], ...] = tuple({} for _ in SIZES)
        self._read = 0  # tokens seen
        self._source = -1  # the position whose token should come next; -1: the end repeats nothing
        self._length = 0  # tokens before there that are the same as at the end
        self._chances = [chance for _, chance in LEVELS]

    def read(self, tokens: array[int], prompt: int) -> None:
        """Take in what is new of ``tokens``; the first ``prompt`` of them say nothing about the chances of drafts."""
        for end in range(self._read + 1, len(tokens) + 1):
            if self._source >= 0:
                self._follow(tokens[end - 1] == tokens[self._source])
            for size, seen in zip(SIZES, self._seen, strict=True):
                if end < size:
                    continue
                run = tokens[end - size : end].tobytes()
                if end >= prompt and self._source < 0 and run in seen:
                    self._source, self._length = seen[run], size
                seen[run] = end
        self._read = len(tokens)

    def _follow(self, right: bool) -> None:
        level = _level(self._length)
        self._chances[level] += WEIGHT * (right - self._chances[level])
        if right:
            self._source, self._length = self._source + 1, self._length + 1
        else:
            self._source = -1

    def drafts(self, tokens: array[int], most: int, floor: float) -> array[int]:
        """Up to ``most`` tokens that may follow ``tokens``, as long as all together have the chance ``floor``."""
        found: array[int] = array("i")
        chance = 1.0
        while self._source >= 0 and len(found) < most:
            chance *= self._chances[_level(self._length + len(found))]
            if chance < floor:
                break
            at = self._source + len(found)  # beyond the end when the end repeats itself
            found.append(tokens[at] if at < len(tokens) else found[at - len(tokens)])
        return found


class PromptLookup:
    """Owns: a :class:`Lookup` for each sequence that it was asked about, until it is forgotten.

    Promises: drafts are a function of the sequence's tokens and of when it was asked, never of a clock.

    ``most``: drafts of one row; ``few``: rows in a step beyond which nothing is drafted.
    """

    def __init__(self, most: int, few: int = 4) -> None:
        self.most = most
        self.few = few
        self._lookups: dict[int, Lookup] = {}

    def drafts(self, sequence: Sequence, most: int, rows: int) -> array[int]:
        """What may follow a sequence that is one of ``rows`` in the next step: at most ``most`` tokens.

        A step of m tokens takes 1 + COST (m - 1) times as long as one of a single token, so the last draft of a row has
        to be right with the chance below for the step to yield more tokens a second than it would without.
        """
        if rows > self.few:
            return NO_TOKENS
        lookup = self._lookups.get(sequence.number)
        if lookup is None:
            lookup = self._lookups[sequence.number] = Lookup()
        lookup.read(sequence.tokens, sequence.prompt_length)
        return lookup.drafts(sequence.tokens, min(most, self.most), rows / (rows + (1 - COST) / COST))

    def forget(self, number: int) -> None:
        self._lookups.pop(number, None)


def _level(length: int) -> int:
    level = 0
    while level + 1 < len(LEVELS) and length >= LEVELS[level + 1][0]:
        level += 1
    return level
