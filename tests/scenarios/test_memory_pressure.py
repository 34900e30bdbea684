"""Cases of pools that are too small: preemption, refusal at intake, forks without room, thousands of random events."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engines import Rig, alone, answer, ids, outputs, six_bits, solo
from octavo.core.layout import KVLayout, LayerGroup
from octavo.core.request import Request
from octavo.core.sequence import State
from octavo.engine.memory import MemoryPlan
from octavo.errors import RequestError
from octavo.paging.audit import audit, audit_idle
from octavo.paging.prefix import chain_hash


def test_r03_preempted_sequences_hit_their_own_leftovers() -> None:
    """R03: pool 12, B=4, 8 requests of 12 + 24 tokens in chunks, 20 rounds on the same cache."""
    rig = Rig(pool=12, block_size=4, budget=10)
    for r in range(20):
        requests = [(rig.add(ids(12, i + r % 3), 24), ids(12, i + r % 3)) for i in range(8)]
        rig.run()
        for request, prompt in requests:
            assert outputs(request) == alone(prompt, 24)
    assert rig.engine.stats().counters.preemptions > 20


def test_r06_what_can_never_fit_is_refused() -> None:
    """R06: both numbers in the refusal, the next request is served, the pool's limit ends one without max_tokens."""
    rig = Rig(pool=8, block_size=16, context=512)
    with pytest.raises(RequestError, match="200 prompt tokens.* 201 tokens exceed the 128 tokens") as refused:
        rig.add(ids(200), 1)
    assert (refused.value.field, refused.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(RequestError, match=r"100 prompt tokens \+ max_tokens 400 = 500 tokens exceed the 128") as error:
        rig.add(ids(100), 400)
    assert error.value.field == "max_tokens"
    with pytest.raises(RequestError, match="600 prompt tokens.* 601 tokens exceed the context of 512"):
        rig.add(ids(600), None)
    served = rig.add(ids(5), 3)
    rig.run()
    assert outputs(served) == alone(ids(5), 3)
    endless = rig.add(ids(100), None)
    fitting = rig.add(ids(100), 28)
    rig.run()
    assert endless.branches[0].finish_reason == "length" and len(endless.branches[0].tokens) == 128
    assert outputs(endless) == outputs(fitting) == alone(ids(100), 28)


@pytest.mark.parametrize("windows", [(None,), (None, 8), (8, 8), (None, 3, 40), (1,), (6,), (5, None, None)])
@pytest.mark.parametrize("budget", [1, 5, 1000])
def test_the_longest_request_fits_alone(windows: tuple[int | None, ...], budget: int) -> None:
    """What intake lets through runs to its end in this very pool, whatever the windows and the chunk."""
    for pool in range(len(windows) * 2, len(windows) * 2 + 9):
        for size in (1, 3, 4):
            rig = Rig(pool=pool, block_size=size, windows=windows, budget=budget, context=10**6)
            if rig.kv.longest() < 2:
                continue
            length = min(rig.kv.longest(), 60)
            request = rig.add(ids(max(1, length - 5)), length - max(1, length - 5))
            rig.run()
            assert len(request.branches[0].tokens) == length


def test_r08_nobody_takes_the_place_of_a_preempted_request() -> None:
    """R08, first come: a long request that is preempted finishes soon in spite of steady newcomers.

    Each step checks that no sequence is admitted in the step in which a better-ranked one loses its blocks.
    """
    rig = Rig(pool=20, block_size=4, budget=16)
    early = [rig.add(ids(8, i), 22) for i in range(2)]
    long = rig.add(ids(36, 7), 16)
    step, started = 0, False
    order: list[Request] = []
    newcomers: list[Request] = []
    while not long.finished:
        newcomers.append(rig.add(ids(6, 20 + step % 5), 5))
        was_waiting = started and long.branches[0].state is State.WAITING
        running = {s.number for s in rig.engine.scheduler.running}
        rig.step()
        started = started or long.branches[0].state is State.RUNNING
        order += [r for r in newcomers if r.finished and r not in order]
        if was_waiting and long.branches[0].state is State.WAITING:
            admitted = {s.number for s in rig.engine.scheduler.running} - running
            assert not admitted, "a newcomer was admitted while the preempted request waits"
        step += 1
        assert step < 90, "the long request is put off for ever"
    assert 1 <= long.preemptions <= 2, f"preempted {long.preemptions} times"
    rig.run()
    assert outputs(long) == alone(ids(36, 7), 16) and outputs(early[0]) == alone(ids(8, 0), 22)
    done = [r.number for r in newcomers]
    assert done == sorted(done) and all(r.finished for r in newcomers)


def test_r08_priorities() -> None:
    """R08: the urgent overtake, equals keep the order of arrival, the preempted end with their full answers."""
    rig = Rig(pool=16, block_size=4, budget=16, policy="priority")
    low = [rig.add(ids(10, i), 20, priority=5) for i in range(4)]
    rig.steps(6)
    urgent = [rig.add(ids(12, 10 + i), 8, priority=0) for i in range(3)]
    rig.run()
    firsts = [r.first_token or 0.0 for r in urgent]
    assert firsts == sorted(firsts)
    ends = {r.id: last_event(rig, r) for r in low + urgent}
    assert max(ends[r.id] for r in urgent) < min(ends[r.id] for r in low[1:])
    assert sum(r.preemptions for r in low) >= 1 and not any(r.preemptions for r in urgent)
    assert [ends[r.id] for r in low] == sorted(ends[r.id] for r in low)
    assert [outputs(r) for r in low] == [alone(ids(10, i), 20) for i in range(4)]
    assert [outputs(r) for r in urgent] == [alone(ids(12, 10 + i), 8) for i in range(3)]


def last_event(rig: Rig, request: Request) -> int:
    """The step in which a request got its last token."""
    number = request.branches[0].number
    return max(plan.step for plan in rig.executor.plans if any(row.sequence == number for row in plan.rows))


@pytest.mark.parametrize("hash", [chain_hash, six_bits])
def test_r13_two_thousand_random_events(hash: Any) -> None:
    """R13 (and R34 with six bits): add, step, abort, fork, preempt, reset on a pool of 24, recounted after each."""
    rng = random.Random(13)
    rig = Rig(pool=24, block_size=4, budget=12, hash=hash)
    prefixes = [ids(rng.randint(3, 30), s) for s in range(4)]
    prompts = [rng.choice(prefixes) + ids(rng.randint(0, 5), i % 3) for i in range(12)]
    kinds = [
        (prompt, rng.choice([3, 9, 20]), {"n": rng.choice([1, 1, 3]), "temperature": rng.choice([0.0, 1.0]), "seed": 3})
        for prompt in prompts
    ]
    stored = [answer(solo(prompt, most, **given)) for prompt, most, given in kinds]
    alive: list[tuple[Request, int]] = []
    checked = 0
    for _ in range(2000):
        event = rng.random()
        if event < 0.15 and len(alive) < 12:
            kind = rng.randrange(len(kinds))
            prompt, most, given = kinds[kind]
            alive.append((rig.add(prompt, most, **given), kind))
        elif event < 0.19 and alive:
            rig.engine.abort(alive.pop(rng.randrange(len(alive)))[0])
        elif event < 0.24 and rig.engine.scheduler.running:
            rig.engine.scheduler.preempt(rng.choice(rig.engine.scheduler.running))
        elif event < 0.25:
            rig.kv.reset_cache()
        else:
            rig.steps(1)
        audit(rig.kv)
        for request, kind in [pair for pair in alive if pair[0].finished]:
            assert answer(request) == stored[kind]
            checked += 1
        alive = [pair for pair in alive if not pair[0].finished]
        assert len(rig.kv.index) <= 12 * 16 + rig.kv.pool.size, "the index grows without end"
    rig.run()
    assert checked > 100
    audit_idle(rig.kv)
    assert not rig.engine.requests and not rig.engine._owners
    rig.kv.reset_cache()
    assert not rig.kv.index.nodes() and not rig.kv.index.roots(), "nodes are left of prefixes that are gone"


def test_r35_requests_that_do_not_fit_together_all_finish() -> None:
    """R35: pool 16, four requests that each fit alone: some are preempted, none is aborted."""
    rig = Rig(pool=16, block_size=4, budget=16)
    requests = [rig.add(ids(16, i), 32) for i in range(4)]
    rig.run()
    assert [outputs(r) for r in requests] == [alone(ids(16, i), 32) for i in range(4)]
    counters = rig.engine.stats().counters
    assert counters.preemptions > 0 and counters.aborted == counters.failed == 0 and counters.finished == 4


def test_r35_the_limits_are_told_apart() -> None:
    """R35: the start-up line has the pool's size, the limit of one request, and how many of that length fit."""
    layout = KVLayout(16, 1, 8, "float16", (LayerGroup(None, (0,)),))
    told = MemoryPlan(64, layout, context=512, longest=1024, why="kv_blocks").describe()
    assert "64 blocks of 16 tokens" in told and "1024 tokens in all" in told
    assert "longest request 512 tokens (model 512), 2 of that length at a time" in told


@pytest.mark.parametrize("pool", [3, 4, 7])
@pytest.mark.parametrize("max_running", [1, 3, 256])
def test_64_samples_in_a_pool_that_holds_three_blocks(pool: int, max_running: int) -> None:
    """Parallel samples are sequences of their own: all finish wherever one of them fits."""
    rig = Rig(pool=pool, block_size=4, budget=8, max_running=max_running)
    request = rig.add(ids(6), 5, n=64, temperature=1.0, seed=1)
    rig.run()
    assert outputs(request) == alone(ids(6), 5, n=64, temperature=1.0, seed=1)
    assert len({tuple(o) for o in outputs(request)}) > 50


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("budget", [1, 2, 5])
@pytest.mark.parametrize("max_running", [1, 2, 64])
@pytest.mark.parametrize("windows", [(None,), (1,), (3, None)])
def test_the_narrowest_settings(size: int, budget: int, max_running: int, windows: tuple[int | None, ...]) -> None:
    """Blocks of one token, steps of one token, one sequence at a time, windows smaller than a block."""
    rig = Rig(
        pool=-(-24 // size) * len(windows), block_size=size, budget=budget, max_running=max_running, windows=windows
    )
    wanted = [(ids(5 + i, i % 2), 6, {"n": 1 + i % 3, "seed": i, "temperature": 1.0}) for i in range(5)]
    wanted.append((ids(9, 1), 0, {"prompt_logprobs": 1}))
    wanted.append((ids(1, 1), 0, {"prompt_logprobs": 1, "n": 2}))
    requests = [rig.add(prompt, most, **given) for prompt, most, given in wanted]
    rig.run()
    for request, (prompt, most, given) in zip(requests, wanted, strict=True):
        assert answer(request) == answer(solo(prompt, most, windows=windows, **given))


def test_decodes_rotate_when_the_budget_is_smaller_than_they_are_many() -> None:
    """The best-ranked has a token in every step, the others take turns: nobody waits long."""
    rig = Rig(pool=200, block_size=4, budget=4)
    requests = [rig.add(ids(4, i), 30) for i in range(10)]
    while any(r.first_token is None for r in requests):
        rig.step()
    seen = [len(outputs(r)[0]) for r in requests]
    rig.steps(9)  # 4 + 8 * 4 tokens: one each of the first, and three each of nine that take turns
    now = [len(outputs(r)[0]) for r in requests]
    gained = [b - a for a, b in zip(seen, now, strict=True) if a < 30]
    assert gained[0] == 9 or requests[0].finished
    assert max(gained[1:]) - min(gained[1:]) <= 1, gained


def test_decodes_rotate_beside_a_prompt_that_is_read_first() -> None:
    """A best-ranked prompt takes a token a step at least; of the decodes none sits out two steps in a row."""
    rig = Rig(pool=200, block_size=4, budget=4, policy="priority")
    others = [rig.add(ids(4, i), 40, priority=1) for i in range(4)]
    while any(r.first_token is None for r in others):
        rig.step()
    rig.add(ids(40, 9), 2, priority=0)
    rig.steps(1)
    before = [len(outputs(r)[0]) for r in others]
    rig.steps(16)
    gained = [len(outputs(r)[0]) - a for r, a in zip(others, before, strict=True)]
    assert min(gained) >= 8 and sum(gained) == 3 * 16, gained


def test_waste_is_under_a_block_a_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    """Point 5: a mixed load of mean length 500 in blocks of 16; each step checks that no sequence wastes a block."""
    rng = random.Random(5)
    rig = Rig(pool=1500, block_size=16, budget=512, context=4096, audited=False, blind=True)
    for i in range(60):
        rig.add(ids(rng.randint(20, 780), i), rng.randint(20, 180))
    rig.run()
    stats = rig.engine.stats()
    mean = stats.counters.token_slots / stats.counters.sequence_steps
    with capsys.disabled():
        print(f"\nwaste {100 * stats.waste:.2f} % at block size 16, {mean:.0f} tokens a running sequence; {stats}")
    assert 400 < mean < 600
    assert stats.waste < 0.04
