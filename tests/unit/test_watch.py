"""What is recorded of the pool is what the pool was, in bounded memory."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from engines import Rig, ids
from frames import Unfolded, unfold
from octavo.errors import EngineError
from octavo.watch.recorder import KEY_EVERY, SHARE, Recorder
from octavo.watch.snapshot import MOVING, OWN, RUNNING, SWAPPED, Snapshot, encode, snapshot


def taken(rig: Rig, time: float = 0.0) -> Snapshot:
    engine = rig.engine
    requests = {number: request.id for number, request in engine.requests.items()}
    return snapshot(rig.kv, engine.scheduler.running, engine.scheduler.waiting, requests, {}, time)


def check(rig: Rig, shown: Unfolded) -> None:
    """A frame against the pool itself."""
    pool, host = rig.kv.pool, rig.kv.host
    for block in range(pool.size):
        assert shown.states[block] & 127 == min(pool.counts[block], 127)
        assert bool(shown.states[block] & 128) == (pool.content[block] is not None)
    sequences = [*rig.engine.scheduler.running, *rig.engine.scheduler.waiting]
    assert list(shown.sequences) == [s.number for s in sequences]
    for sequence in sequences:
        row = shown.sequences[sequence.number]
        assert (row["tokens"], row["computed"]) == (len(sequence.tokens), sequence.computed)
        if sequence.number in rig.kv.holdings:
            assert row["state"] == RUNNING
            assert row["tables"] == [list(t) for t in rig.kv.tables(sequence.number)]
    own = [slot for saved in rig.kv.saved.values() for slot in saved.held()]
    for slot in range(host.pool.size if host else 0):
        state = shown.states[pool.size + slot]
        assert (state == OWN) == (slot in own) or state == MOVING


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_frames_say_what_the_pool_was(windows: tuple[int | None, ...]) -> None:
    """Through forks, copies, swaps, slid windows and endings, each frame unfolds to the pool of its moment."""
    rig = Rig(pool=20 * len(windows), windows=windows, swap=12, max_running=12)
    rng = random.Random(f"frames {windows}")
    before: Snapshot | None = None
    data, last = b"", Unfolded()
    swapped = shared = 0
    for step in range(120):
        if rng.random() < 0.2 and len(rig.engine.requests) < 6:
            rig.add(ids(rng.randrange(3, 30), step % 5), rng.randrange(4, 20), n=rng.choice([1, 1, 3]), temperature=0.9)
        if rig.engine.busy:
            rig.step()
        now = taken(rig, float(step))
        key = step % 7 == 0
        frame = encode(now, None if key else before, step + 1)
        data = frame if key else data + frame
        before = now
        last = unfold(data, rig.kv.pool.size + 12)[-1]
        assert last.key == key and last.serial == step + 1 and last.time == step
        check(rig, last)
        swapped += any(row["state"] == SWAPPED for row in last.sequences.values())
        shared += any(s & 127 > 1 for s in last.states[: rig.kv.pool.size])
    assert swapped and shared, "the load shows too little"


def test_a_snapshot_does_not_change_when_the_engine_goes_on() -> None:
    rig = Rig()
    rig.add(ids(20))
    rig.step()
    now = taken(rig)
    kept = encode(now, None, 1)
    rig.run()
    assert encode(now, None, 1) == kept


def test_what_happened_is_told_even_if_the_pool_looks_the_same() -> None:
    rig = Rig()
    now = taken(rig)
    assert now.shows_the_same(replace(now, time=5.0))
    assert not now.shows_the_same(replace(now, figures={**now.figures, "steps": 3.0}))


# ---- what it costs: work is counted, since the time that it takes depends on who else is on the machine --------------


def calls(work: Callable[[], Any]) -> int:
    """Functions, Python's and C's, that are called meanwhile."""
    count = 0

    def hear(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(hear)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def loaded(sequences: int, tokens: int, pool: int) -> Rig:
    rig = Rig(pool=pool, block_size=4, budget=100_000, max_running=256, context=10_000, blind=True)
    for i in range(sequences):
        rig.add(ids(tokens, i), 50)
    for _ in range(3):
        rig.engine.step()
    assert len(rig.engine.scheduler.running) == sequences
    return rig


def test_a_snapshot_is_as_much_work_for_any_number_of_blocks() -> None:
    """It copies the pool and each table whole: ten times the blocks are not one call more."""
    few, many = (loaded(8, tokens, pool) for tokens, pool in ((20, 1000), (2000, 10_000)))
    assert calls(lambda: taken(few)) == calls(lambda: taken(many))


def test_a_snapshot_is_a_dozen_calls_a_sequence() -> None:
    few, many = loaded(8, 20, 1000), loaded(64, 20, 1000)
    assert calls(lambda: taken(many)) - calls(lambda: taken(few)) <= 12 * (64 - 8)


def test_a_frame_is_as_much_work_for_any_number_of_blocks() -> None:
    counts = []
    for tokens, pool in ((20, 1000), (2000, 10_000)):
        rig = loaded(8, tokens, pool)
        before = taken(rig)
        rig.engine.step()
        now = taken(rig)
        counts.append(calls(partial(encode, now, before, 2)))
    assert counts[0] == counts[1]


def test_copies_that_take_long_are_made_rarely() -> None:
    """So rarely that they take no more than their share of the engine's time."""
    bench = Bench(slow=0.001, fast=0.001)
    take = bench.recorder.take

    def slow() -> Snapshot:
        end = time.thread_time() + 0.004
        while time.thread_time() < end:
            pass
        return take()

    bench.recorder.take = slow
    bench.step()
    assert bench.recorder._pause() >= 0.004 / SHARE
    count = bench.taken
    began = time.monotonic()
    while time.monotonic() - began < 0.3:
        with bench.lock:
            bench.rig.engine.counters.steps += 1  # it works all the time
        time.sleep(0.005)
    assert bench.taken <= count + 2  # of some 300 that it would make
    bench.recorder.close()


# ---- the recorder --------------------------------------------------------------------------------------------------


class Bench:
    """A recorder of a rig that is stepped by hand, whose orders are carried out at once."""

    def __init__(self, **settings: Any) -> None:
        self.rig = Rig(pool=64)
        self.lock = threading.Lock()
        self.now = 1000.0
        self.taken = 0
        self.recorder = Recorder(self.take, self.call, lambda: self.rig.engine.counters.steps, **settings)

    def take(self) -> Snapshot:
        self.taken += 1
        return replace(taken(self.rig, self.now), figures={"steps": float(self.rig.engine.counters.steps)})

    def call(self, work: Callable[[], Any]) -> Any:
        with self.lock:
            return work()

    def step(self) -> int:
        """A step, in the history at once."""
        with self.lock:
            if not self.rig.engine.busy:
                self.rig.add(ids(9, self.rig.engine.counters.steps), 60)
            self.rig.step()
            self.now += 1.0
        serial, _ = self.recorder.fresh()
        return serial


def test_history_is_bounded_in_time_and_bytes() -> None:
    bench = Bench(seconds=120.0, slow=1e6, fast=0.0)
    for _ in range(400):
        bench.step()
    frames = bench.recorder.history()
    assert frames[-1].serial >= 400
    assert 120 <= frames[-1].time - frames[0].time <= 120 + KEY_EVERY
    shown = unfold(b"".join(f.data for f in frames), 64)
    assert shown[0].key and [f.serial for f in shown] == [f.serial for f in frames]
    bench.recorder.close()

    small = Bench(most_bytes=40_000, slow=1e6, fast=0.0)
    for _ in range(400):
        small.step()
    assert sum(len(f.data) for f in small.recorder.history()) <= 40_000
    small.recorder.close()


def test_who_lags_goes_on_from_a_key() -> None:
    bench = Bench(slow=1e6, fast=0.0)
    for _ in range(250):
        serial = bench.step()
    recorder = bench.recorder
    assert recorder.since(serial) == []
    assert [f.serial for f in recorder.since(serial - 3)] == [serial - 2, serial - 1, serial]
    for far in (0, serial - 150, serial + 7, 10**12):
        found = recorder.since(far)
        assert unfold(b"".join(f.data for f in found), 64)[0].key and len(found) <= KEY_EVERY
    recorder.close()


def test_an_idle_engine_is_left_alone() -> None:
    bench = Bench(slow=0.005, fast=0.005)
    bench.step()
    time.sleep(0.2)
    count, frames = bench.taken, len(bench.recorder.history())
    time.sleep(0.2)
    assert bench.taken == count and len(bench.recorder.history()) == frames
    bench.step()
    assert bench.recorder.history()[-1].serial == frames + 1
    bench.recorder.close()


def test_listeners_hear_of_frames_and_of_the_end() -> None:
    bench = Bench(slow=1e6, fast=0.0)
    heard: list[int] = []
    leave = bench.recorder.listen(lambda: heard.append(1))
    bench.step()
    assert heard == [1]
    bench.recorder.close()
    assert heard == [1, 1] and bench.recorder.closed
    leave()
    leave()
    assert bench.recorder.watched == 0


def test_a_closed_engine_ends_the_recording_and_keeps_the_past() -> None:
    bench = Bench(slow=0.005, fast=0.0)
    bench.step()

    def closed(work: Callable[[], Any]) -> Any:
        raise EngineError("the engine is closed")

    bench.recorder._call = closed
    with pytest.raises(EngineError):
        bench.recorder.fresh()
    assert bench.recorder.history()
    bench.recorder.close()
