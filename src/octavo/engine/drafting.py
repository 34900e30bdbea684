"""Speculation in the engine: whose next tokens may be drafted, and which drafts were right."""

from __future__ import annotations

from array import array
from typing import Protocol

from octavo.core.plan import Row, RowResult
from octavo.core.request import Request
from octavo.core.sequence import Sequence


class Drafter(Protocol):
    """Guesses what comes next in a sequence, well or badly: no answer depends on it."""

    def drafts(self, sequence: Sequence, most: int, rows: int) -> array[int]:
        """At most ``most`` tokens that may follow a sequence, which is one of ``rows`` in the next step."""

    def forget(self, number: int) -> None:
        """The sequence of this number will not be asked about again."""


def may_draft(request: Request, sequence: Sequence) -> bool:
    """Whether a sequence's next tokens may be drafted: it is past its prompt, and one branch of no beam search.

    Nor does it follow a guide: a mask is known for the next token only.
    """
    decoding = sequence.decoding and len(sequence.tokens) > sequence.prompt_length
    alone = request.beams is None and sequence.params.guide is None
    return decoding and alone and not sequence.forks and not sequence.scoring


def agreed(row: Row, outcome: RowResult) -> int:
    """How many of a row's drafts are what was drawn in their place, up to the first that is not."""
    drafts = row.tokens[len(row.tokens) - row.drafts :]
    pairs = zip(drafts, outcome.tokens, strict=False)
    return next((i for i, (draft, drawn) in enumerate(pairs) if draft != drawn), min(len(drafts), len(outcome.tokens)))
