"""A tensor-parallel step: rank 0 sends the plan, all ranks run the model on their part, rank 0 samples."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from octavo.core.plan import Draw, Plan, Row, RowResult, StepResult
from octavo.errors import EngineError
from octavo.execute import inputs, sampler
from octavo.execute.executor import LocalExecutor
from octavo.execute.team import Team
from octavo.kernels.backend import Logits
from octavo.kernels.parallel import ParallelBackend

log = logging.getLogger("octavo.execute")

A_DRAW = Draw(0, 0, 0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, -1)  # that a row draws decides which logits are wanted


def bare(plan: Plan) -> Plan:
    """The plan as workers need it: rows draw, but not what."""
    return Plan(plan.step, plan.moves, tuple(row._replace(draws=(A_DRAW,)) if row.draws else row for row in plan.rows))


class ParallelExecutor(LocalExecutor):
    """Rank 0: runs a plan with the other ranks.

    Owns: rank 0's part of the blocks, and the team of the others, which get ``patience`` seconds for a step.

    Promises: every rank runs each plan once, in the same order, and none ahead.  Sampling that fails is one row's
    error; a failure while the model runs is an EngineError that says which rank it was, and ends the engine: ranks may
    disagree now.
    """

    def __init__(self, team: Team, patience: float, backend: ParallelBackend, *arguments: Any) -> None:
        super().__init__(backend, *arguments)
        self.team, self.ranks, self.patience = team, backend.ranks, patience

    def submit(self, plan: Plan) -> Any:
        """The plan's results: ranks meet in every step, so that it has ended when this returns."""
        self.team.tell(("run", bare(plan)))
        with self.team.within(self.patience):
            try:
                self._move(plan.moves)
                logits = self._logits(plan.rows) if plan.rows else None
            except Exception as error:
                raise self.team.failure(error) from error
            rows = () if logits is None else self._drawn(plan.rows, logits)
        self.team.check()  # an exchange that was broken off from outside leaves anything behind, and no error
        return StepResult(plan.step, rows)

    def collect(self, ticket: Any) -> StepResult:
        result: StepResult = ticket
        return result

    def close(self) -> None:
        self.team.close()
        super().close()
        self.ranks.close()

    def _drawn(self, rows: Sequence[Row], logits: Logits) -> tuple[RowResult, ...]:
        try:
            return sampler.results(self.backend, rows, logits, self.banned)
        except Exception as error:
            log.warning("sampling failed (%s); sampling %d rows one by one", error, len(rows))
        out, at = [], 0
        for row in rows:
            count = inputs.wanted(row)
            out.append(self._drawn_alone(row, logits[at : at + count]))
            at += count
        return tuple(out)

    def _drawn_alone(self, row: Row, logits: Logits) -> RowResult:
        try:
            return sampler.results(self.backend, (row,), logits, self.banned)[0]
        except Exception as error:
            return RowResult(error=f"{type(error).__name__}: {error}")


def follow(executor: LocalExecutor, pipe: Connection) -> None:
    """A worker's life: run the plans that come, until told to close.  Raises EOFError or OSError if rank 0 is gone."""
    while True:
        kind, plan = pipe.recv()
        if kind == "close":
            return
        if kind != "run":
            raise EngineError(f"a worker was told {kind!r}")
        executor.compute(plan)
