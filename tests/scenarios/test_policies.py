"""Who goes first: fair shares, priorities, shortest first; every policy under memory pressure.  Case R72."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engines import Rig, alone, ids, outputs
from octavo.config import EngineConfig
from octavo.core.request import Request
from octavo.errors import ConfigError
from octavo.schedule.policies import POLICIES, QUANTUM, FairShare

ALL = tuple(POLICIES)


def heavy_and_light(policy: str, pool: int, heavy: bool = True, swap: int = 0) -> tuple[int, list[int], Rig]:
    """User a has 50 long requests at once, user b a short one every tenth step; steps in all, and b's waits."""
    rig = Rig(pool=pool, budget=32, policy=policy, swap=swap, audited=False)
    for i in range(50 if heavy else 0):
        rig.add(ids(40, i), 60, user="a")
    short: list[tuple[Request, int]] = []
    waits: dict[str, int] = {}
    step = 0
    while rig.engine.busy or step < 100:
        if step % 10 == 0 and (heavy or step < 100):
            short.append((rig.add(ids(8, step), 4, user="b"), step))
        if rig.engine.busy:
            rig.step()
        step += 1
        for request, since in short:
            if request.finished:
                waits.setdefault(request.id, step - since)
    assert len(waits) == len(short)
    return step, list(waits.values()), rig


@pytest.mark.parametrize("pool", [80, 300])
@pytest.mark.parametrize("swap", [0, 200])
def test_r72_a_heavy_user_does_not_starve_a_light_one(pool: int, swap: int) -> None:
    """R72: b's mean wait is a few times its solo 4 steps, where first come makes it hundreds; the total stays."""
    _, solo, _ = heavy_and_light("fair", pool, heavy=False)
    assert set(solo) == {4}
    fair_steps, fair, rig = heavy_and_light("fair", pool, swap=swap)
    first_steps, first, _ = heavy_and_light("fcfs", pool, swap=swap)
    mean, mean_first = sum(fair) / len(fair), sum(first) / len(first)
    assert mean <= 4 * 4 and max(fair) <= 10 * 4
    assert mean_first > 10 * mean
    assert fair_steps <= 1.04 * first_steps, "fairness costs next to nothing"
    counters = rig.engine.scheduler.policy.counters  # type: ignore[attr-defined]
    assert counters["a"] >= 50 * (40 + 60), "tokens served are shown by user"


def test_a_heavy_users_requests_all_come_out_right() -> None:
    rig = Rig(pool=40, budget=32, policy="fair", swap=10)
    asked = [(rig.add(ids(20, i), 20, user="a"), (ids(20, i), 20)) for i in range(15)]
    for i in range(15):
        asked.append((rig.add(ids(8, 50 + i), 4, user="b"), (ids(8, 50 + i), 4)))
        rig.steps(3)
    rig.run()
    for request, given in asked:
        assert outputs(request) == alone(*given)


@pytest.mark.parametrize("weights", [{"a": 1.0, "b": 1.0}, {"a": 3.0}, {"a": 1.0, "b": 4.0}])
def test_r72_shares_follow_weights(weights: dict[str, float]) -> None:
    """While both users have more than they can get, what they are served stands as their weights."""
    rig = Rig(pool=60, budget=16, max_running=6, audited=False, policy="fair")
    policy = rig.engine.scheduler.policy = FairShare(weights)
    asked = [rig.add(ids(10, i), 30, user="ab"[i % 2]) for i in range(400)]
    rig.steps(600)
    assert sum(not r.finished for r in asked if r.user == "a") > 10
    assert sum(not r.finished for r in asked if r.user == "b") > 10
    served = {u: policy.counters[u] * weights.get(u, 1.0) for u in "ab"}
    want = weights.get("a", 1.0) / weights.get("b", 1.0)
    assert served["a"] / served["b"] == pytest.approx(want, rel=0.25)


def test_idle_time_is_no_credit() -> None:
    """A user who comes back after a long pause does not lock the others out."""
    rig = Rig(pool=100, budget=16, policy="fair", audited=False)
    rig.add(ids(8), 4, user="b")
    rig.run()
    for i in range(30):
        rig.add(ids(30, i), 30, user="a")
    rig.steps(100)
    for i in range(30):
        rig.add(ids(30, 50 + i), 30, user="b")
    counters = rig.engine.scheduler.policy.counters  # type: ignore[attr-defined]
    assert counters["b"] == counters["a"] > 500
    before = dict(counters)
    rig.steps(100)
    gained = {u: counters[u] - before[u] for u in "ab"}
    assert gained["a"] > 0.3 * gained["b"] and abs(counters["a"] - counters["b"]) < 6 * QUANTUM
    rig.run()


def test_shortest_first_goes_by_what_is_left() -> None:
    rig = Rig(pool=2000, budget=16, context=4000, max_running=1, policy="shortest", audited=False)
    asked = [rig.add(ids(10, i), most) for i, most in enumerate((3 * QUANTUM, QUANTUM * 2 - 20, 5, 10, QUANTUM + 5))]
    rig.run()
    order = sorted(range(5), key=lambda i: asked[i].first_token or 0.0)
    assert order == [2, 3, 1, 4, 0] or order == [2, 3, 4, 1, 0]
    assert all(len(outputs(r)[0]) == len(r.branches[0].output()) for r in asked)


def test_low_priority_is_evicted_first() -> None:
    rig = Rig(pool=12, budget=32, policy="priority")
    low, middle = rig.add(ids(12, 1), 20, priority=9), rig.add(ids(12, 2), 20, priority=5)
    rig.steps(3)
    urgent = rig.add(ids(20, 3), 20, priority=1)
    rig.run()
    assert low.preemptions >= 1 and urgent.preemptions == 0
    assert (urgent.first_token or 0) < 20
    for request, given in ((low, (ids(12, 1), 20)), (middle, (ids(12, 2), 20)), (urgent, (ids(20, 3), 20))):
        assert outputs(request) == alone(*given)


@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize("swap", [0, 1, 4, 300])
@pytest.mark.parametrize("pool", [6, 9, 20])
def test_nothing_is_lost(policy: str, swap: int, pool: int) -> None:
    """200 requests with forks, beams, aborts, priorities and users, under each policy: each right, none lost."""
    rng = random.Random(f"{policy}{swap}{pool}")
    rig = Rig(
        pool=pool, budget=rng.choice([4, 16]), policy=policy, swap=swap, disk=rng.choice([0, 15]), files={},
        lose=lambda move: rng.random() < 0.2,
    )  # fmt: skip
    asked: list[tuple[Request, Any]] = []
    aborted: list[Request] = []
    for i in range(200):
        prompt, most = ids(rng.randint(1, 10), rng.randrange(12)), rng.choice([1, 4, 10])
        given: dict[str, Any] = {"n": rng.choice([1, 1, 1, 2, 3]), "temperature": 1.0, "seed": rng.randrange(3)}
        if i % 10 == 9 and pool > 6:
            beam = rig.intake.beam_search(prompt, width=2, max_tokens=min(most, 4))
            rig.engine.add(beam)
            asked.append((beam, None))
        else:
            request = rig.add(prompt, most, priority=rng.randrange(3), user=rng.choice("abc"), **given)
            asked.append((request, (prompt, most, given)))
        rig.steps(rng.choice([0, 1, 3, 10]))
        if rng.random() < 0.05:
            victim = rng.choice(asked)[0]
            if not victim.finished:
                rig.engine.abort(victim)
                aborted.append(victim)
    rig.run()
    for request, load in asked:
        assert request.finished and request.error is None
        if load is not None and request not in aborted:
            prompt, most, given = load
            assert outputs(request) == alone(prompt, most, **given)
        elif load is None and request not in aborted:
            assert len(request.beams.search.finished) == 2
    most_preempted = max(r.preemptions for r, _ in asked)
    assert most_preempted <= 40, "preemptions a request are bounded"


def test_bad_weights() -> None:
    for weights in ({"a": 0}, {"a": -1.0}, {"a": "much"}, {"a": True}, {"a": float("inf")}):
        with pytest.raises(ConfigError, match="a weight must be above 0"):
            EngineConfig.of(policy="fair", user_weights=weights)
    with pytest.raises(ConfigError, match='user_weights go with policy="fair"'):
        EngineConfig.of(user_weights={"a": 1.0})
    with pytest.raises(ConfigError, match="policy must be one of"):
        EngineConfig.of(policy="random")
