"""Who runs a plan: the protocol, and the executor in this process."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from octavo.core.layout import KVLayout
from octavo.core.plan import DEVICE, Move, Plan, Row, RowResult, StepResult
from octavo.execute import inputs, sampler
from octavo.kernels.backend import Backend, Program

log = logging.getLogger("octavo.execute")


class Executor(Protocol):
    """Runs plans.  ``run`` is a function of (weights, stores, plan) and writes only slots that the plan names."""

    def run(self, plan: Plan) -> StepResult: ...

    def close(self) -> None: ...


class LocalExecutor:
    """Owns: the blocks' bytes of the device tier, and the program that computes a step.

    Promises: a row that fails gets an error and its neighbours their results.
    """

    def __init__(
        self,
        backend: Backend,
        program: Program,
        layout: KVLayout,
        blocks: int,
        banned: Sequence[int] = (),
    ) -> None:
        self.backend = backend
        self.program = program
        self.layout = layout
        # Untouched pages of an empty array cost no memory: the pool fills as blocks are first used.
        self.blocks = np.empty((blocks, layout.block_bytes), np.uint8)
        self.banned = np.asarray(banned, np.int32)

    def run(self, plan: Plan) -> StepResult:
        self._move(plan.moves)
        try:
            rows = self._compute(plan.rows)
        except Exception as error:  # whatever a kernel may raise: find the row it is about
            log.warning("step %d failed (%s); running its %d rows one by one", plan.step, error, len(plan.rows))
            rows = tuple(self._alone(row) for row in plan.rows)
        return StepResult(plan.step, rows)

    def close(self) -> None:
        self.blocks = np.empty((0, self.layout.block_bytes), np.uint8)

    def _move(self, moves: Sequence[Move]) -> None:
        if moves:
            pairs = np.array([(m.source.slot, m.target.slot) for m in moves], np.int32)
            if any(m.source.tier != DEVICE or m.target.tier != DEVICE for m in moves):
                raise ValueError("this executor has one tier")
            self.backend.move(self.blocks, self.blocks, pairs)

    def _compute(self, rows: Sequence[Row]) -> tuple[RowResult, ...]:
        if not rows:
            return ()
        logits = self.program.run(inputs.batch(rows, len(self.layout.groups)), self.blocks)
        return sampler.results(self.backend, rows, logits, self.banned)

    def _alone(self, row: Row) -> RowResult:
        try:
            return self._compute((row,))[0]
        except Exception as error:
            return RowResult(error=f"{type(error).__name__}: {error}")
