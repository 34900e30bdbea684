"""Who runs a plan: the protocol, and the executor in this process."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

import numpy as np

from octavo.core.layout import KVLayout
from octavo.core.plan import DEVICE, DISK, HOST, Move, Plan, Row, RowResult, StepResult
from octavo.execute import inputs, sampler
from octavo.execute.disk import DiskStore
from octavo.kernels.backend import Backend, Logits, Program

log = logging.getLogger("octavo.execute")

WAIT = 0.1  # seconds that a step without rows waits for a slow move


class Executor(Protocol):
    """Runs plans.  ``run`` is a function of (weights, stores, plan) and writes only slots that the plan names."""

    def run(self, plan: Plan) -> StepResult: ...

    def flush(self, moves: Sequence[Move]) -> None: ...

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
        host_slots: int = 0,
        disk: DiskStore | None = None,
    ) -> None:
        self.backend = backend
        self.program = program
        self.layout = layout
        self.blocks = backend.store(blocks, layout.block_bytes, DEVICE)
        self.host = backend.store(host_slots, layout.block_bytes, HOST)
        self.tiers = {DEVICE: self.blocks, HOST: self.host}
        self.disk = disk
        self.banned = np.asarray(banned, np.int32)

    def run(self, plan: Plan) -> StepResult:
        self._move(plan.moves)
        try:
            rows = self._compute(plan.rows)
        except Exception as error:  # whatever a kernel may raise: find the row it is about
            log.warning("step %d failed (%s); running its %d rows one by one", plan.step, error, len(plan.rows))
            rows = tuple(self._alone(row) for row in plan.rows)
        moved = self.disk.completed(wait=0.0 if plan.rows else WAIT) if self.disk else ()
        return StepResult(plan.step, rows, tuple(moved))

    def flush(self, moves: Sequence[Move]) -> None:
        """Write blocks to disk, waiting for room in the queue; for the end of the engine's life."""
        self._move_disk(moves, wait=True)

    def close(self) -> None:
        if self.disk is not None:
            self.disk.close()
        self.blocks = self.backend.store(0, self.layout.block_bytes, DEVICE)
        self.host = self.backend.store(0, self.layout.block_bytes, HOST)
        self.tiers = {DEVICE: self.blocks, HOST: self.host}

    def _move(self, moves: Sequence[Move]) -> None:
        """In order; moves between the same two tiers that follow each other go in one batch."""
        for (source, target), batch in groupby(moves, key=lambda m: (m.source.tier, m.target.tier)):
            if DISK in (source, target):
                self._move_disk(list(batch))
                continue
            pairs = np.array([(m.source.slot, m.target.slot) for m in batch], np.int32)
            self.backend.move(self.tiers[source], self.tiers[target], pairs)

    def copy_rate(self) -> float:
        """Bytes a second that moves between the device and the host tier reach, measured now on a few blocks."""
        n = max(1, min(len(self.blocks), len(self.host), 1 + (8 << 20) // self.layout.block_bytes))
        size = self.layout.block_bytes
        device, host = self.backend.store(n, size, DEVICE), self.backend.store(n, size, HOST)
        pairs = np.repeat(np.arange(n, dtype=np.int32), 2).reshape(n, 2)
        for i in range(n):
            self.backend.block(host, i)[:] = 1
        self.backend.move(host, device, pairs)  # once for pages and kernels that are not there yet
        self.backend.block(host, 0)
        began = time.perf_counter()
        self.backend.move(device, host, pairs)
        self.backend.block(host, 0)
        return n * size / max(time.perf_counter() - began, 1e-9)

    def _move_disk(self, moves: Sequence[Move], wait: bool = False) -> None:
        for move in moves:
            assert self.disk is not None
            if move.target.tier == DISK:
                self.disk.write(move, self.backend.block(self.tiers[move.source.tier], move.source.slot), wait)
            else:
                self.disk.read(move, self.backend.block(self.host, move.target.slot))

    def compute(self, plan: Plan) -> None:
        """The plan's moves and its pass through the model, without drawing: what all ranks but one do."""
        self._move(plan.moves)
        if plan.rows:
            self._logits(plan.rows)

    def _compute(self, rows: Sequence[Row]) -> tuple[RowResult, ...]:
        return sampler.results(self.backend, rows, self._logits(rows), self.banned) if rows else ()

    def _logits(self, rows: Sequence[Row]) -> Logits:
        for row in rows:
            for draw in row.draws:
                if draw.mask is not None:
                    draw.mask.begin()
        return self.program.run(inputs.batch(rows, len(self.layout.groups)), self.blocks)

    def _alone(self, row: Row) -> RowResult:
        try:
            return self._compute((row,))[0]
        except Exception as error:
            return RowResult(error=f"{type(error).__name__}: {error}")
