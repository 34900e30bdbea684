"""Speculation in the engine: whose next tokens may be drafted, and which drafts were right."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import Protocol

from octavo.core.plan import NO_TOKENS, Row, RowResult
from octavo.core.request import Request
from octavo.core.sequence import Sequence


class Drafter(Protocol):
    """Guesses what comes next in a sequence, well or badly: no answer depends on it."""

    def drafts(self, sequence: Sequence, most: int, rows: int) -> array[int]:
        """At most ``most`` tokens that may follow a sequence, which is one of ``rows`` in the next step."""

    def forget(self, number: int) -> None:
        """The sequence of this number will not be asked about again."""


def may_draft(request: Request, sequence: Sequence) -> bool:
    """Whether a sequence's next tokens may be drafted: it is past its prompt, and draws alone."""
    return sequence.decoding and len(sequence.tokens) > sequence.prompt_length and request.single(sequence)


def note_drafts(drafter: Drafter, running: Iterable[Sequence], owners: Mapping[int, Request]) -> None:
    """Note what may come next in sequences that decode; the scheduler takes of it what there is room for."""
    active = [s for s in running if not s.parked]
    for sequence in active:
        sequence.drafts = NO_TOKENS
        room = sequence.limit - len(sequence.tokens) - 1  # behind the last draft a token is drawn
        if room > 0 and may_draft(owners[sequence.number], sequence):
            sequence.drafts = drafter.drafts(sequence, room, len(active))


def agreed(row: Row, outcome: RowResult) -> int:
    """How many of a row's drafts are what was drawn in their place, up to the first that is not."""
    drafts = row.tokens[len(row.tokens) - row.drafts :]
    pairs = zip(drafts, outcome.tokens, strict=False)
    return next((i for i, (draft, drawn) in enumerate(pairs) if draft != drawn), min(len(drafts), len(outcome.tokens)))
