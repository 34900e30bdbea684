"""Who runs a plan: the protocol, and the executor in this process."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Protocol

import numpy as np

from octavo.core.layout import KVLayout
from octavo.core.plan import DEVICE, DISK, HOST, Move, Plan, Row, RowResult, StepResult, drawn, filled, waits
from octavo.errors import EngineError
from octavo.execute import inputs, sampler
from octavo.execute.disk import DiskStore
from octavo.kernels.backend import Backend, Logits, Program

log = logging.getLogger("octavo.execute")

WAIT = 0.1  # seconds that a step without rows waits for a slow move


class Executor(Protocol):
    """Runs plans.  ``run`` is a function of (weights, stores, plan) and writes only slots that the plan names.

    It is ``collect(submit(plan))``.  Between the two another plan may be submitted, whose rows may stand for tokens
    that the first draws; results are collected in the order of the plans.  ``ahead``: whether that is worth it.
    """

    ahead: bool

    def run(self, plan: Plan) -> StepResult: ...

    def submit(self, plan: Plan) -> Any: ...

    def collect(self, ticket: Any) -> StepResult: ...

    def flush(self, moves: Sequence[Move]) -> None: ...

    def close(self) -> None: ...


class Ticket:
    """A plan that was submitted.

    Owns: what its results will be read from, and those of the plan before it where it reads tokens of it.
    """

    __slots__ = ("plan", "before", "drawing", "error", "rows", "redone")

    def __init__(self, plan: Plan, before: Ticket | None) -> None:
        self.plan = plan
        self.before = before
        self.drawing: sampler.Drawing | None = None
        self.error: Exception | None = None
        self.rows: tuple[RowResult, ...] | None = None
        self.redone = False  # its rows had to be run one by one: what the device drew does not count

    @property
    def sure(self) -> bool:
        """Whether nothing has gone wrong so far, here or in what it reads."""
        return self.error is None and not self.redone and not (self.before is not None and self.before.redone)


class LocalExecutor:
    """Owns: the blocks' bytes of the device tier, and the program that computes a step.

    Promises: a row that fails gets an error and its neighbours their results, also where they read tokens of a plan
    that had to be run again.  A device that computes nothing any more is an EngineError that says so.
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
        self.ahead = backend.asynchronous
        self._latest: Ticket | None = None

    def run(self, plan: Plan) -> StepResult:
        return self.collect(self.submit(plan))

    def submit(self, plan: Plan) -> Ticket:
        """Begin the plan's moves, its pass through the model and its draws."""
        before = self._latest if waits(plan.rows) else None
        if before is not None and not (self.backend.recalls and before.sure):
            plan, before = replace(plan, rows=filled(plan.rows, self._tokens(before))), None
        try:
            self._move(plan.moves)
        except Exception as error:
            self._check(error)
            raise
        self._latest = ticket = Ticket(plan, before)
        try:
            if plan.rows:
                ticket.drawing = sampler.begin(self.backend, plan.rows, self._logits(plan.rows), self.banned)
        except Exception as error:  # whatever a kernel may raise: which row it is about is found in _again
            ticket.error = error
        return ticket

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for what the plan drew."""
        rows = self._rows(ticket)
        moved = self.disk.completed(wait=0.0 if rows else WAIT) if self.disk else ()
        return StepResult(ticket.plan.step, rows, tuple(moved))

    def _rows(self, ticket: Ticket) -> tuple[RowResult, ...]:
        if ticket.rows is None:
            try:
                if ticket.sure:
                    ticket.rows = ticket.drawing.results() if ticket.drawing else ()
            except Exception as error:
                ticket.error = error
            if ticket.rows is None:
                ticket.rows = self._again(ticket)
            ticket.before = ticket.drawing = None
        return ticket.rows

    def _tokens(self, ticket: Ticket) -> list[int]:
        return drawn(ticket.plan.rows, self._rows(ticket))

    def _again(self, ticket: Ticket) -> tuple[RowResult, ...]:
        """The rows of a plan that failed, or that read tokens of one that did, one by one."""
        plan, why = ticket.plan, ticket.error or "it read tokens of one that failed"
        log.warning("step %d failed (%s); running its %d rows one by one", plan.step, why, len(plan.rows))
        self._check(ticket.error)
        ticket.redone = True
        rows = plan.rows if ticket.before is None else filled(plan.rows, self._tokens(ticket.before))
        return tuple(self._alone(row) for row in rows)

    def _check(self, error: Exception | None) -> None:
        """Raises EngineError if the device will never answer again."""
        lost = None if error is None else self.backend.lost()
        if lost is not None:
            raise EngineError(lost) from error

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

    def _logits(self, rows: Sequence[Row]) -> Logits:
        for row in rows:
            for draw in row.draws:
                if draw.mask is not None:
                    draw.mask.begin()
        return self.program.run(inputs.batch(rows, len(self.layout.groups)), self.blocks)

    def _alone(self, row: Row) -> RowResult:
        try:
            return sampler.results(self.backend, (row,), self._logits((row,)), self.banned)[0]
        except Exception as error:
            self._check(error)
            return RowResult(error=f"{type(error).__name__}: {error}")
