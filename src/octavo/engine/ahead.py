"""One step ahead: while a step runs, the next one is decided, committed and submitted, on tokens that nobody knows yet.

    step n    submitted ........ tokens come | folded
    step n+1              decided, submitted ........ tokens come | folded

The tokens that step n draws stay on the device: the rows of n+1 name them by number (``core/plan.py:stand_in``).  So
that n+1 is decided and committed as any other step is, the sequences of n are for a moment as they will be when n is
folded in, with those names for tokens.  Only what is decided *quietly* is committed: rows of sequences that run
already, one token or a chunk further.  Whoever comes, goes or comes back waits until n is folded in, and so do rows
whose draws need to know the token before: guides, penalties, bad words, drafts, beams.

A sequence that ends with n, or is aborted while n+1 runs, has a row in n+1 for nothing: what it draws is never looked
at.  It writes into a block that is the sequence's alone and has no content; if that has been given back by then, who
takes it next writes later, since the device does everything in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from octavo.core.plan import Plan, Row, stand_in
from octavo.core.request import Request
from octavo.core.sequence import Sequence
from octavo.schedule.scheduler import Decision, Draws, Scheduler


@dataclass(frozen=True)
class Flight:
    """A step that was committed and is not folded in yet; its ticket, or None if it has not been submitted."""

    decision: Decision
    plan: Plan
    ticket: Any = None

    def rows(self) -> Iterator[tuple[Sequence, int, int, Row]]:
        for (sequence, start, stop), row in zip(self.decision.rows, self.plan.rows, strict=True):
            yield sequence, start, stop, row

    @cached_property
    def stops(self) -> dict[int, int]:
        """How far each sequence, by its number, is computed once this has been folded in."""
        return {sequence.number: stop for sequence, _, stop in self.decision.rows}


def follow(
    flight: Flight, scheduler: Scheduler, owners: Mapping[int, Request], now: float, budget: int, draws: Draws
) -> tuple[Decision, Plan] | None:
    """What the step after ``flight`` computes, committed; None, and nothing changed, if it cannot be known yet.

    ``owners``: requests by the number of their sequences; whoever has none has ended, and needs no row.
    """
    if flight.decision.deferred or (scheduler.kv.disk is not None and scheduler.kv.disk.flights):
        return None  # somebody waits for what this step brings
    if not all(_settled(owners.get(sequence.number), sequence, row) for sequence, _, _, row in flight.rows()):
        return None
    with _folded(flight, owners):
        decision = scheduler.decide(now, budget)
        if not _quiet(decision, owners):
            return None
        return decision, scheduler.commit(decision, flight.plan.step + 1, draws)


@contextmanager
def _folded(flight: Flight, owners: Mapping[int, Request]) -> Iterator[None]:
    """Sequences as they will be after the flight, for a moment; those that end with it have nothing to compute."""
    before: list[tuple[Sequence, int, bool, int]] = []
    draw = 0
    try:
        for sequence, _, stop, row in flight.rows():
            if sequence.number in owners:
                before.append((sequence, sequence.computed, sequence.parked, len(sequence.tokens)))
                sequence.computed = stop
                if row.draws:
                    sequence.tokens.append(stand_in(draw))
                    sequence.parked = len(sequence.tokens) >= sequence.limit
                else:
                    sequence.parked = stop == len(sequence.tokens)
            draw += len(row.draws)
        yield
    finally:
        for sequence, computed, parked, length in before:
            sequence.computed, sequence.parked = computed, parked
            del sequence.tokens[length:]


def _settled(request: Request | None, sequence: Sequence, row: Row) -> bool:
    """Whether a row's outcome is known but for which token it draws; a request that has ended has none to know."""
    if request is None or not (row.draws or row.targets):
        return True
    return _plain(request, sequence) and not row.drafts


def _quiet(decision: Decision, owners: Mapping[int, Request]) -> bool:
    """Whether the step only goes on with what runs, in rows that may be submitted before the tokens are known."""
    changes = decision.victims or decision.admitted or decision.attached or decision.fetches
    return bool(decision.rows) and not changes and all(_ready(owners, *row) for row in decision.rows)


def _ready(owners: Mapping[int, Request], sequence: Sequence, start: int, stop: int) -> bool:
    """A chunk of a prompt is, unless it is scored; a row that draws only if the token before does not matter."""
    return not sequence.scoring and (stop < len(sequence.tokens) or _plain(owners[sequence.number], sequence))


def _plain(request: Request, sequence: Sequence) -> bool:
    """Whether a sequence draws one token a step, from what depends on the tokens before through the model alone."""
    return request.single(sequence) and not request.params.penalised and not request.rules.bad
