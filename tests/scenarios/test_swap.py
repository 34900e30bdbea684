"""Swapping to the host tier: bytes, room, fall-backs, and the choice between swap and recompute."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import real
import tiny
from conftest import TinyModels
from engines import Rig, alone, answer, ids, outputs, six_bits
from octavo.core.plan import HOST
from octavo.core.request import Request
from octavo.core.sequence import Sequence, State
from octavo.engine.build import Parts
from octavo.paging.audit import audit, audit_idle
from octavo.paging.prefix import chain_hash
from octavo.schedule.preempt import RATE, SwapChoice


def kv_bytes(parts: Parts, sequence: Sequence) -> list[list[np.ndarray]]:
    """K and V of every computed token in every layer group: for each group, its blocks' bytes as floats."""
    kv, executor = parts.engine.kv, parts.engine.executor
    layout = executor.layout  # type: ignore[attr-defined]
    out = []
    for table in kv.tables(sequence.number):
        blocks = []
        for b, block in enumerate(table):
            if block < 0:
                continue
            filled = min(layout.block_size, sequence.computed - b * layout.block_size)
            bytes_ = executor.blocks[block].copy()  # type: ignore[attr-defined]
            if filled == layout.block_size:
                blocks.append(bytes_)
        out.append(blocks)
    return out


@pytest.mark.parametrize(("family", "cache"), [("llama", True), ("llama", False), ("gemma3", True), ("gemma3", False)])
def test_r09_swapped_blocks_are_byte_equal(family: str, cache: bool, tiny_models: TinyModels) -> None:
    """R09: K and V of every layer are the same bytes after a sequence has been out and in, and so is what follows."""
    prompt = tiny.prompt(50)
    groups = 6 if family == "gemma3" else 1
    path = tiny_models.folder(family)
    want = real.Solo(path, block_size=4).answer(prompt, 20)
    settings: dict[str, Any] = {"kv_blocks": 60 * groups, "block_size": 4, "swap_memory": "64MiB", "preempt": "swap"}
    with real.engine(path, prefix_cache=cache, **settings) as parts:
        engine, executor = parts.engine, parts.engine.executor
        request = real.add(parts, prompt, 20)
        for _ in range(6):
            engine.step()
        sequence = request.branches[0]
        before, computed = kv_bytes(parts, sequence), sequence.computed
        assert sum(len(group) for group in before) >= 12
        engine.scheduler.preempt(sequence)
        assert sequence.state is State.WAITING and engine.scheduler.swaps == 1
        moved = engine.kv.drain()
        executor._move(moved)  # type: ignore[attr-defined]
        assert (len(moved) > 2 * groups) is (not cache), "only what cannot be found by content moves at once"
        if not cache:
            executor.blocks[:] = 0xFF  # type: ignore[attr-defined]
        others = [real.add(parts, tiny.prompt(3, 7 + i), 1) for i in range(2)]
        while sequence.state is State.WAITING:
            engine.step()
        after = kv_bytes(parts, sequence)
        assert sequence.computed == computed + 1, "it went on where it had stopped, with a single token"
        for old, new in zip(before, after, strict=True):
            shift = len(old) - len(new) if len(new) < len(old) else 0  # a window may have passed a block meanwhile
            for one, other in zip(old[shift:], new, strict=False):
                assert (one == other).all()
        real.finish(parts)
        assert answer(request) == want and all(o.finished for o in others)
        assert request.preemptions == 1


@pytest.mark.parametrize("pool", [10, 12, 20])
@pytest.mark.parametrize("cache", [True, False])
def test_r09_all_blocks_leave_and_return(pool: int, cache: bool, tiny_models: TinyModels) -> None:
    """Forced out at random moments, sequences that share blocks answer as if alone; the host tier is clean after."""
    prompts = [tiny.prompt(9, 0), tiny.prompt(9, 0) + [5], tiny.prompt(13, 50)]
    path = tiny_models.folder("llama")
    solo = real.Solo(path)
    rng = random.Random(pool)
    with real.engine(
        path, kv_blocks=pool, block_size=4, swap_memory="1MiB", preempt="swap", prefix_cache=cache
    ) as parts:
        engine = parts.engine
        given = {"n": 2, "temperature": 0.9, "seed": 4}
        asked = [real.add(parts, p, 12, **given) for p in prompts]
        while engine.busy:
            engine.step()
            if engine.scheduler.running and rng.random() < 0.3:
                engine.scheduler.preempt(rng.choice(engine.scheduler.running))
        assert engine.scheduler.swaps > 3 and engine.scheduler.recomputes == 0
        audit_idle(engine.kv)
        for request, prompt in zip(asked, prompts, strict=True):
            assert answer(request) == solo.answer(prompt, 12, **given)


@pytest.mark.parametrize("swap", [0, 1, 4, 100])
def test_r09_swap_space_runs_out(swap: int) -> None:
    """R09: an n=4 request and two long ones in a pool of 10: what finds no room is recomputed, and right."""
    rig = Rig(pool=10, block_size=4, swap=swap)
    four = rig.add(ids(10), 12, n=4, temperature=1.0, seed=1)
    long = [rig.add(ids(14, s), 20) for s in (1, 2)]
    rig.run()
    assert outputs(four) == alone(ids(10), 12, n=4, temperature=1.0, seed=1)
    assert [outputs(r) for r in long] == [alone(ids(14, s), 20) for s in (1, 2)]
    scheduler = rig.engine.scheduler
    assert scheduler.preemptions == scheduler.swaps + scheduler.recomputes > 3
    assert (scheduler.swaps == 0) is (swap == 0)
    if swap == 100:
        assert scheduler.recomputes == 0
    assert rig.kv.host is None or rig.kv.host.pool.free == swap


def test_shared_blocks_move_once() -> None:
    """Branches that are swapped out in one step share their blocks in the host tier as well."""
    rig = Rig(pool=40, block_size=4, swap=40, prefix_cache=False)
    request = rig.add(ids(21), 10, n=4, temperature=1.0, seed=1)
    rig.steps(4)
    held = rig.kv.pool.size - rig.kv.pool.free
    for sequence in list(rig.engine.scheduler.running):
        rig.engine.scheduler.preempt(sequence)
    assert rig.kv.host is not None
    assert rig.kv.host.pool.size - rig.kv.host.pool.free == held < 4 * 6
    rig.run()
    assert outputs(request) == alone(ids(21), 10, n=4, temperature=1.0, seed=1)


@pytest.mark.parametrize("swap", [0, 2, 12])
@pytest.mark.parametrize("evicted", [1, 2, 10])
def test_r10_swap_in_after_evictions(swap: int, evicted: int) -> None:
    """R10: pool 10; a long sequence is out, some cached blocks of it are evicted: it waits or goes on."""
    rig = Rig(pool=10, block_size=4, swap=swap)
    victim = rig.add(ids(33), 7)
    rig.steps(4)
    rig.engine.scheduler.preempt(victim.branches[0])
    assert victim.branches[0].state is State.WAITING
    order = rig.kv.pool.free_order()
    named = [b for b in order if rig.kv.pool.content[b] is not None]
    for block in named[:evicted]:
        rig.kv.pool.forget(block)
        audit(rig.kv)
    other = rig.add(ids(30, 5), 5)
    rig.run()
    assert outputs(victim) == alone(ids(33), 7) and outputs(other) == alone(ids(30, 5), 5)


@pytest.mark.parametrize("swap", [0, 1, 4, 200])
@pytest.mark.parametrize("hash", [chain_hash, six_bits])
@pytest.mark.parametrize("disk", [0, 20])
def test_r13_random_operations(swap: int, hash: Any, disk: int) -> None:
    """R13, R34 with all tiers on: add, abort, fork, preempt, reset on 24 blocks; every answer is the stored one."""
    rng = random.Random(f"{swap}{disk}")
    rig = Rig(pool=24, block_size=4, swap=swap, disk=disk, hash=hash, lose=lambda move: rng.random() < 0.1, files={})
    heads = [ids(rng.randint(4, 16), s) for s in range(4)]
    live: list[Request] = []
    asked: list[tuple[Request, Any]] = []
    for _ in range(500):
        what = rng.random()
        if what < 0.12:
            prompt, most, n = (
                rng.choice(heads) + ids(rng.randint(0, 4), rng.randrange(3)),
                rng.choice([2, 9]),
                rng.choice([1, 3]),
            )
            given = {"n": n, "temperature": 1.0, "seed": rng.randrange(2)}
            asked.append((rig.add(prompt, most, priority=rng.randrange(2), **given), (prompt, most, given)))
            live.append(asked[-1][0])
        elif what < 0.14 and live:
            rig.engine.abort(live.pop(rng.randrange(len(live))))
        elif what < 0.2 and rig.engine.scheduler.running:
            rig.engine.scheduler.preempt(rng.choice(rig.engine.scheduler.running))
        elif what < 0.21:
            rig.kv.reset_cache()
        else:
            rig.steps(1)
        audit(rig.kv)
    rig.run()
    checked = 0
    for request, (prompt, most, given) in asked:
        if all(s.finish_reason == "length" for s in request.branches) and request.branches:
            assert outputs(request) == alone(prompt, most, **given)
            checked += 1
    assert checked > 30


@pytest.mark.parametrize("swap", [0, 1, 4, 100])
@pytest.mark.parametrize("disk", [0, 30])
def test_r08_a_preempted_request_keeps_its_place(swap: int, disk: int) -> None:
    """R08 with swap and disk: one long request against a steady stream of short ones."""
    rig = Rig(pool=12, block_size=4, swap=swap, disk=disk, files={})
    long = rig.add(ids(20), 24)
    short = []
    for i in range(60):
        if not long.finished:
            short.append((rig.add(ids(7, i % 9), 6), i % 9))
        rig.steps(1)
    assert long.finished and long.preemptions <= 3
    rig.run()
    assert outputs(long) == alone(ids(20), 24)
    for request, i in short:
        assert outputs(request) == alone(ids(7, i), 6)


@pytest.mark.parametrize("swap", [0, 4])
def test_r08_urgent_ones_overtake(swap: int) -> None:
    rig = Rig(pool=12, block_size=4, swap=swap, policy="priority")
    low = [rig.add(ids(12, i), 12, priority=5) for i in range(6)]
    rig.steps(3)
    urgent = rig.add(ids(20, 9), 8, priority=0)
    rig.run(200)
    ended = [e for e in (urgent, *low)]
    first = {r.id: r.first_token for r in ended}
    assert sum(t < first[urgent.id] for t in first.values() if t is not None) <= 3, "those that ran already"
    times = [r.first_token or 0.0 for r in low]
    assert times == sorted(times), "equal priorities keep their order"
    assert outputs(urgent) == alone(ids(20, 9), 8)


# ---- the choice -----------------------------------------------------------------------------------------------------


def choice(rig: Rig, mode: str = "auto", bandwidth: float = 1e9, rate: float = 1000.0) -> SwapChoice:
    return SwapChoice(rig.kv, mode, 1 << 20, bandwidth, lambda: rate)


def test_the_cheaper_side_is_taken() -> None:
    """Made-up bandwidths and rates: 40 tokens in 10 blocks of 1 MiB."""
    rig = Rig(pool=20, block_size=4, swap=20)
    request = rig.add(ids(39), 8)
    rig.steps(3)
    sequence = request.branches[0]
    assert sequence.computed == 39
    slow_copy = choice(rig, bandwidth=1e6, rate=1e5)
    assert slow_copy.costs(39, 10) == (pytest.approx(20.97, rel=1e-3), pytest.approx(39e-5))
    assert not slow_copy(sequence), "copying is slow: recompute"
    assert choice(rig, bandwidth=1e10, rate=100.0)(sequence), "computing is slow: swap"
    even = 2 * 10 * (1 << 20) / (39 / 1000.0)
    assert choice(rig, bandwidth=even * 1.01)(sequence) and not choice(rig, bandwidth=even * 0.99)(sequence)
    assert not choice(rig, bandwidth=0.0)(sequence), "a bandwidth of nothing is no way"
    assert choice(rig, rate=0.0).costs(500, 1)[1] == pytest.approx(500 / RATE), "until a rate has been measured"
    for bandwidth in (1.0, 1e12):
        assert choice(rig, "swap", bandwidth)(sequence) and not choice(rig, "recompute", bandwidth)(sequence)
    rig.run()


def test_without_a_host_tier_nothing_is_swapped() -> None:
    rig = Rig(pool=20, block_size=4)
    request = rig.add(ids(9), 8)
    rig.steps(2)
    assert not choice(rig, "swap")(request.branches[0])
    rig.run()


@pytest.mark.parametrize(("bandwidth", "swaps"), [(1.0, False), (1e12, True)])
def test_the_choice_is_what_happens(bandwidth: float, swaps: bool) -> None:
    rig = Rig(pool=10, block_size=4, swap=30)
    rig.engine.scheduler.swap_pays = choice(rig, bandwidth=bandwidth)
    asked = [rig.add(ids(10, i), 16) for i in range(4)]
    rig.run()
    scheduler = rig.engine.scheduler
    assert (scheduler.swaps > 0, scheduler.recomputes > 0) == (swaps, not swaps)
    for i, request in enumerate(asked):
        assert outputs(request) == alone(ids(10, i), 16)


def test_a_swapped_sequence_computes_nothing_twice() -> None:
    rigs = []
    for swap in (0, 50):
        rig = Rig(pool=10, block_size=4, swap=swap)
        for i in range(4):
            rig.add(ids(10, i), 16)
        rig.run()
        rigs.append(rig)
    recomputed, swapped = rigs
    assert swapped.computed() == 4 * (10 + 15) < recomputed.computed()
    assert any(move.source.tier == HOST for plan in swapped.executor.plans for move in plan.moves)
