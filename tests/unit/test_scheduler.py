"""What a step serves: shares of the budget, admission, victims, ranks, deferral."""

from __future__ import annotations

import copy
from array import array
from typing import Any

import pytest

from engines import Rig, alone, ids, outputs
from octavo.core.params import SamplingParams
from octavo.core.plan import Plan, StepResult
from octavo.core.request import Request
from octavo.core.sequence import State
from octavo.engine.session import SessionState
from octavo.paging.kv import KV
from octavo.schedule.budget import TokenBudget
from octavo.schedule.policies import Policy, Priority


def served(rig: Rig) -> dict[int, int]:
    """Tokens that the last step computed, by request number."""
    plan = rig.executor.plans[-1]
    owners = {s.number: s.request for s in (*rig.engine.scheduler.running, *rig.engine.scheduler.waiting)}
    return {owners.get(row.sequence, -row.sequence): len(row.tokens) for row in plan.rows}


def numbers(sequences: list[Any]) -> list[int]:
    return [s.request for s in sequences]


# ---- the budget -----------------------------------------------------------------------------------------------------


def test_decodes_have_their_token_and_prompts_share_the_rest() -> None:
    rig = Rig(pool=200, block_size=4, budget=20)
    for i in range(3):
        rig.add(ids(4, i), 50)
    rig.step()
    assert served(rig) == {1: 4, 2: 4, 3: 4}
    rig.add(ids(30, 7), 5)
    rig.add(ids(30, 8), 5)
    rig.step()
    assert served(rig) == {1: 1, 2: 1, 3: 1, 4: 17}
    rig.step()
    assert served(rig) == {1: 1, 2: 1, 3: 1, 4: 13, 5: 4}, "what the first prompt leaves goes to the next one"


def test_a_prompt_that_is_better_ranked_leaves_the_decodes_their_token() -> None:
    rig = Rig(pool=200, block_size=4, budget=10, policy="priority")
    for i in range(4):
        rig.add(ids(2, i), 50, priority=5)
    rig.step()
    rig.add(ids(60, 9), 5, priority=0)
    rig.step()
    assert served(rig) == {5: 6, 1: 1, 2: 1, 3: 1, 4: 1}


def test_a_scored_chunk_has_few_logits_rows() -> None:
    """The logits of scored tokens are all kept until they are read, so the chunk is bounded."""
    rig = Rig(pool=200, block_size=4, budget=64)
    rig.engine.scheduler.most_logits = 5
    request = rig.add(ids(23), 2, prompt_logprobs=1)
    rig.run()
    sizes = [len(row.tokens) for plan in rig.executor.plans for row in plan.rows]
    assert max(sizes) <= 5 and outputs(request) == alone(ids(23), 2)
    assert all(len(row.targets) <= 5 for plan in rig.executor.plans for row in plan.rows)


def test_the_chosen_budget_follows_prompts_not_decodes() -> None:
    """Steps that are mostly decodes are slower a token; they must not shrink the chunks in which prompts are read."""
    rig = Rig(pool=600, block_size=16, context=8192, audited=False, blind=True)
    rig.engine.budget = TokenBudget(target=10.0)
    run = rig.executor.run

    def timed(plan: Plan) -> StepResult:
        rig.clock.advance(sum(len(row.tokens) / (400 if len(row.tokens) > 1 else 5) for row in plan.rows))
        return run(plan)

    rig.executor.run = timed
    for i in range(100):
        rig.add(ids(60, i), 20)
    while rig.engine.busy:
        rig.step()
        assert rig.engine.budget.tokens >= 512, "decodes made the prompt chunk smaller"
    assert rig.engine.budget.tokens == 2048


# ---- admission ------------------------------------------------------------------------------------------------------


def test_nobody_overtakes_what_does_not_fit() -> None:
    rig = Rig(pool=10, block_size=4, budget=64)
    rig.add(ids(16, 1), 8)
    rig.step()
    rig.add(ids(24, 2), 2)  # six blocks, of which five are free and one is to be spared
    small = rig.add(ids(2, 3), 2)
    for _ in range(3):
        rig.step()
        assert numbers(rig.engine.scheduler.waiting) == [2, 3], "the small one went past the large one"
    rig.run()
    assert outputs(small) == alone(ids(2, 3), 2)


@pytest.mark.parametrize(("pool", "running"), [(10, [1, 2, 3]), (9, [1, 2])])
def test_admission_leaves_a_block_for_each_that_runs(pool: int, running: list[int]) -> None:
    """Two run and take a second block now; a prompt of four blocks comes in if two more are left."""
    rig = Rig(pool=pool, block_size=4, budget=64)
    for i in range(2):
        rig.add(ids(4, i), 9)
    rig.step()
    rig.add(ids(16, 5), 2)
    rig.step()
    assert numbers(rig.engine.scheduler.running) == running


def test_max_running_counts_those_that_wait_for_a_prefix() -> None:
    for most, admitted in ((4, [1, 4]), (3, [1])):
        rig = Rig(pool=100, block_size=4, budget=100, max_running=most)
        for _ in range(3):
            rig.add(ids(40, 1), 3)
        rig.add(ids(5, 2), 3)
        rig.step()
        assert numbers(rig.engine.scheduler.running) == admitted
        assert rig.deferred == 2
        rig.run()


def test_a_scored_prompt_waits_for_nobody() -> None:
    """It could not use the blocks that another row computes, so it computes its own at once."""
    rig = Rig(pool=100, block_size=4, budget=100)
    for given in ({}, {"prompt_logprobs": 1}, {}):
        rig.add(ids(40, 1), 3, **given)
    rig.step()
    assert numbers(rig.engine.scheduler.running) == [1, 2] and rig.deferred == 1


def test_forks_beyond_max_running_wait_in_their_rank() -> None:
    rig = Rig(pool=100, block_size=4, budget=64, max_running=3)
    rig.add(ids(6, 1), 6, n=5, temperature=1.0)
    other = rig.add(ids(6, 2), 6)
    rig.step()
    assert [(s.request, s.branch) for s in rig.engine.scheduler.running] == [(1, 0), (1, 1), (2, 0)]
    assert [(s.request, s.branch) for s in rig.engine.scheduler.waiting] == [(1, 2), (1, 3), (1, 4)]
    rig.run()
    assert not other.preemptions, "a branch pushed out an equal"


# ---- victims --------------------------------------------------------------------------------------------------------


def fill(rig: Rig, count: int, length: int = 8, most: int = 40, **given: Any) -> list[Request]:
    requests = [rig.add(ids(length, i), most, **given) for i in range(count)]
    rig.step()
    assert all(r.branches[0].state is State.RUNNING for r in requests)
    return requests


def test_memory_is_taken_from_the_worst_rank() -> None:
    rig = Rig(pool=9, block_size=4, budget=64, audited=True)
    requests = fill(rig, 3, most=27)
    while not any(r.preemptions for r in requests):
        rig.step()
    assert [r.preemptions for r in requests] == [0, 0, 1]
    assert 1 in served(rig) and 2 in served(rig)
    rig.run()
    assert [outputs(r) for r in requests] == [alone(ids(8, i), 27) for i in range(3)]


def test_one_that_is_served_is_no_victim_of_the_same_step() -> None:
    """A decision names no sequence both as a victim and as a row, whatever the pool."""
    for pool in range(7, 20):
        rig = Rig(pool=pool, block_size=2, budget=7)
        for i in range(6):
            rig.add(ids(3 + i, i), 5, n=1 + i % 3, temperature=1.0)
        scheduler = rig.engine.scheduler
        while rig.engine.busy:
            decision = scheduler.decide(0.0, 7)
            rows = [s.number for s, _, _ in decision.rows]
            assert len(set(rows)) == len(rows)
            assert not set(rows) & {s.number for s in decision.victims}
            rig.step()


def test_the_best_ranked_pushes_out_whoever_runs() -> None:
    """An urgent request that needs the whole pool gets it."""
    rig = Rig(pool=8, block_size=4, budget=64, policy="priority")
    requests = fill(rig, 3, 4, 20, priority=3)
    urgent = rig.add(ids(28, 9), 4, priority=0)
    rig.step()
    assert numbers(rig.engine.scheduler.running) == [4] and [r.preemptions for r in requests] == [1, 1, 1]
    rig.run()
    assert outputs(urgent) == alone(ids(28, 9), 4)
    assert [outputs(r) for r in requests] == [alone(ids(4, i), 20) for i in range(3)]


def test_equals_do_not_push_each_other_out() -> None:
    rig = Rig(pool=8, block_size=4, budget=64, policy="priority")
    requests = fill(rig, 2, 8, 6, priority=3)
    late = rig.add(ids(24, 9), 4, priority=3)
    rig.step()
    assert numbers(rig.engine.scheduler.waiting) == [3]
    rig.run()
    assert not any(r.preemptions for r in (*requests, late))


def test_an_idle_session_is_no_place_to_run() -> None:
    """It keeps its blocks when others wait because as many run as may, not because memory is short."""
    rig = Rig(pool=100, block_size=4, max_running=1)
    session = SessionState(rig.engine, rig.intake, array("i", ids(10, 1)), b"", "")
    request = session.begin(SamplingParams(temperature=0.0, max_tokens=3))
    rig.steps(20)
    session.end(request)
    asked = [rig.add(ids(6, i), 4) for i in range(3)]
    rig.steps(20)
    assert not rig.engine.busy and all(r.finished for r in asked)
    assert rig.engine.scheduler.preemptions == 0 and session.sequence.number in rig.kv.holdings


def test_a_preempted_sequence_is_empty_handed_and_first_in_line() -> None:
    rig = Rig(pool=40, block_size=4, budget=64)
    requests = fill(rig, 3)
    victim = requests[1].branches[0]
    rig.add(ids(5, 9), 3)
    rig.engine.scheduler.preempt(victim)
    assert victim.state is State.WAITING and victim.computed == 0 and victim.number not in rig.kv.holdings
    assert numbers(rig.engine.scheduler.waiting) == [2, 4]
    rig.run()
    assert outputs(requests[1]) == alone(ids(8, 1), 40)
    assert requests[1].cached == 0, "blocks that it had computed itself are no hits"


# ---- deciding is pure -----------------------------------------------------------------------------------------------


def snapshot(rig: Rig) -> Any:
    kv, scheduler = rig.kv, rig.engine.scheduler
    return (
        list(kv.pool.counts),
        kv.pool.free_order(),
        {number: [(list(t.ids), t.head) for t in h.tables] for number, h in kv.holdings.items()},
        [(s.number, s.state, s.computed, s.served, s.preemptions, s.cached) for s in scheduler.running],
        [(s.number, s.state, s.computed, s.served, s.preemptions, s.cached) for s in scheduler.waiting],
        len(kv.index),
        len(kv.index.roots()),
        scheduler.preemptions,
    )


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_deciding_changes_nothing(windows: tuple[int | None, ...]) -> None:
    """On any state: decide as often as one likes, with any budget, and nothing has changed."""
    rig = Rig(pool=14 * len(windows), block_size=4, budget=9, windows=windows)
    for i in range(8):
        rig.add(ids(6 + 3 * i, i % 3), 6, n=1 + i % 2, temperature=1.0, cache_salt="s" if i % 4 == 0 else None)
    while rig.engine.busy:
        before = copy.deepcopy(snapshot(rig))
        for budget in (1, 3, 9, 500):
            rig.engine.scheduler.decide(0.0, budget)
        assert snapshot(rig) == before
        rig.step()


def test_a_budget_that_changes_from_step_to_step() -> None:
    rig = Rig(pool=12, block_size=4, budget=9)
    requests = [rig.add(ids(9 + i, i), 8) for i in range(6)]
    step = 0
    while rig.engine.busy:
        rig.engine.budget.fixed = rig.engine.budget.tokens = (1, 50, 2, 7, 300)[step % 5]
        rig.step()
        step += 1
    assert [outputs(r) for r in requests] == [alone(ids(9 + i, i), 8) for i in range(6)]


# ---- ranks ----------------------------------------------------------------------------------------------------------


def test_ranks() -> None:
    rig = Rig()
    a, b, c = (rig.add([1], 1, priority=p, n=2).branches[0] for p in (5, 1, 5))
    assert sorted([c, b, a], key=lambda s: Policy().rank(s, 0.0)) == [a, b, c]
    assert sorted([c, b, a], key=lambda s: Priority().rank(s, 0.0)) == [b, a, c]
    assert Policy().level(a) == Policy().level(b)
    assert Priority().level(b) < Priority().level(a) == Priority().level(c)


# ---- extending ------------------------------------------------------------------------------------------------------


def test_a_verb_does_all_or_nothing() -> None:
    """An extension beyond the free blocks raises and takes none; a hit that has been evicted is not attached."""
    kv = KV(4, 4)
    rig = Rig()
    first, second = (rig.intake.request(ids(12, i)).branch(i, 0, array("i", ids(12, i))) for i in (1, 2))
    kv.open(first)
    with pytest.raises(RuntimeError, match="4 blocks are free"):
        kv.extend(first, 0, 17)
    assert kv.pool.free == 4 and len(kv.tables(1)[0]) == 0
    kv.extend(first, 0, 12)
    kv.publish(first, 12)
    kv.release(1)
    assert kv.match(second) is None
    hit = kv.match(first)
    assert hit is not None and hit.length == 8
    kv.open(second)
    kv.extend(second, 0, 12)
    kv.open(first)
    with pytest.raises(RuntimeError, match="evicted"):
        kv.pin(hit)
    with pytest.raises(RuntimeError, match="holds blocks already"):
        kv.open(first)
