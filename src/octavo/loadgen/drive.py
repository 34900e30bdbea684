"""The load is put on: open (requests come when they come) or closed (one comes when another ends)."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from octavo.loadgen.asking import Asker, Record
from octavo.loadgen.prompts import Writer
from octavo.loadgen.traffic import Planned

GONE = 10  # connections refused one after the other: the server isn't there any more
RETRY = 1.0  # seconds that a place of the closed loop rests after a refusal, if the server names no time
Told = Callable[["Drive"], None]


@dataclass(frozen=True)
class Limits:
    """``concurrency``: places of the closed loop (None: open).  ``duration``: nothing starts after these seconds.
    ``patience``: seconds that a request may take.
    """

    concurrency: int | None = None
    duration: float | None = None
    patience: float = 600.0


class Drive:
    """Owns: the requests in flight and the records of all.

    Promises: each request that was started has exactly one record, filled in, when ``run`` returns; ``stop`` makes it
    return soon, with what was measured so far.
    """

    def __init__(self, asker: Asker, writer: Writer, requests: Iterator[Planned], limits: Limits) -> None:
        self.records: list[Record] = []
        self.running: set[asyncio.Task[None]] = set()
        self.lag: list[float] = []  # seconds that the open loop sent a request after its time
        self.began = self.ended = 0.0
        self.gone: str | None = None
        self.stopped = False
        self._asker, self._writer, self._requests, self._limits = asker, writer, requests, limits
        self._refused: deque[bool] = deque(maxlen=GONE)
        self._main: asyncio.Task[None] | None = None

    async def run(self) -> None:
        self.began = time.perf_counter()
        self._main = asyncio.ensure_future(self._open() if self._limits.concurrency is None else self._closed())
        try:
            await self._main
        except asyncio.CancelledError:
            if not self.stopped:  # cancelled from outside
                raise
        finally:
            await self._drop()
            self.ended = time.perf_counter()

    def stop(self) -> None:
        """Start nothing more and leave what runs."""
        self.stopped = True
        if self._main is not None:
            self._main.cancel()

    @property
    def done(self) -> int:
        return len(self.records) - len(self.running)

    @property
    def seconds(self) -> float:
        return (self.ended or time.perf_counter()) - self.began

    async def _drop(self) -> None:
        left = list(self.running)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _open(self) -> None:
        for planned in self._requests:
            body = self._body(planned)  # made before its time has come
            at = planned.at or 0.0
            if self._over(at):
                break
            await asyncio.sleep(max(0.0, self.began + at - time.perf_counter()))
            self.lag.append(time.perf_counter() - self.began - at)
            self._start(planned, body)
        while self.running:
            await asyncio.wait(self.running)

    async def _closed(self) -> None:
        places = [asyncio.ensure_future(self._place()) for _ in range(self._limits.concurrency or 1)]
        try:
            await asyncio.gather(*places)
        finally:
            for place in places:
                place.cancel()
            await asyncio.gather(*places, return_exceptions=True)

    async def _place(self) -> None:
        """One place of the closed loop: a request, and when it has ended the next."""
        for planned in self._requests:
            if self._over(time.perf_counter() - self.began):
                return
            task, record = self._start(planned, self._body(planned))
            await asyncio.wait([task])
            if record.failure is not None:
                await asyncio.sleep(RETRY if record.retry_after is None else record.retry_after)

    def _over(self, at: float) -> bool:
        return self._limits.duration is not None and at >= self._limits.duration

    def _body(self, planned: Planned) -> bytes:
        return self._asker.body(self._writer.prompt(planned), planned.output)

    def _start(self, planned: Planned, body: bytes) -> tuple[asyncio.Task[None], Record]:
        now = time.perf_counter()
        record = Record(planned.number, now if planned.at is None else self.began + planned.at, now)
        self.records.append(record)
        task = asyncio.ensure_future(self._one(body, record))
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        return task, record

    async def _one(self, body: bytes, record: Record) -> None:
        try:
            await asyncio.wait_for(self._asker.ask(body, record), self._limits.patience)
        except TimeoutError:
            record.failure = "time limit"
            record.error = f"not finished within {self._limits.patience:g} s"
        self._refused.append(record.failure == "connect")
        if len(self._refused) == GONE and all(self._refused) and self.gone is None:
            self.gone = record.error
            self.stop()


async def warm(asker: Asker, writer: Writer, count: int, shape: Planned, patience: float) -> Sequence[Record]:
    """Requests ahead of the load, one after the other, that no figure counts: the first that fails is the last."""
    records = []
    for i in range(count):
        planned = Planned(-1 - i, None, shape.prompt, min(shape.output, 16))
        drive = Drive(asker, writer, iter([planned]), Limits(1, patience=patience))
        await drive.run()
        records += drive.records
        if not records[-1].whole:
            break
    return records
