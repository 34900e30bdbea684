"""No step is larger than what was reserved for, under any load: tokens, rows, logits, and pieces of attention."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from engines import VOCAB, Rig, ids
from octavo.config import EngineConfig
from octavo.core.layout import KVLayout, LayerGroup
from octavo.core.plan import LargestStep, Plan
from octavo.core.sequence import State
from octavo.engine.gpu_memory import largest_step
from octavo.execute import inputs
from octavo.kernels.backend import Batch
from octavo.schedule.budget import TokenBudget

REACHED: dict[str, int] = {}  # the parts of the bound that some step came up to
SEEDS = range(40)
CONTEXT, SCORES, DRAFTS = 96, 5, 2


def load(rig: Rig, rng: random.Random) -> None:
    """Prompts long and short, scored ones, several branches, beams, and a session that rests and is forked."""
    kind = rng.choice(["plain", "plain", "scored", "scored", "branches", "beams", "session"])
    prompt, seed = ids(rng.choice([1, 9, 30, 50]), rng.randrange(20)), rng.randrange(1000)
    if kind == "scored":
        rig.add(prompt, rng.choice([0, 3]), prompt_logprobs=0, priority=rng.randrange(3))
    elif kind == "branches":
        rig.add(prompt, 6, n=rng.choice([2, 6]), temperature=1.0, seed=seed)
    elif kind == "beams":
        rig.engine.add(rig.intake.beam_search(prompt, width=rng.choice([2, 6]), max_tokens=5))
    elif kind == "session":
        rig.engine.rest(rig.intake.tokens(prompt), b"", "")
    else:
        rig.add(prompt, rng.choice([1, 12]), priority=rng.randrange(3))


@pytest.mark.parametrize("seed", SEEDS)
def test_no_step_is_larger_than_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    budget, running = rng.choice([None, 7, 24, 64]), rng.choice([2, 4, 12])
    rig = Rig(400, 4, budget=budget or 1, max_running=running, context=CONTEXT, policy="priority", drafts=DRAFTS)
    rig.engine.budget = TokenBudget(budget)
    rig.engine.scheduler.most_logits = SCORES
    config = EngineConfig(max_batched_tokens=budget, max_running=running, speculate=DRAFTS)
    most = largest_step(config, CONTEXT, SCORES)
    for _ in range(rng.choice([5, 10])):
        load(rig, rng)
        for _ in range(rng.choice([0, 0, 1, 2])):
            if rig.engine.busy:
                rig.engine.step()
                check(rig.executor.plans[-1], most)
    while rig.engine.busy:
        rig.engine.step()
        check(rig.executor.plans[-1], most)


def check(plan: Plan, most: LargestStep) -> None:
    logits = sum(inputs.wanted(row) for row in plan.rows)
    scored = [row for row in plan.rows if row.targets and len(row.tokens) > 1]
    assert plan.tokens <= most.tokens and len(plan.rows) <= most.rows and logits <= most.logits
    assert all(row.start + len(row.tokens) <= most.context for row in plan.rows)
    assert sum(len(row.tokens) for row in scored) <= SCORES
    for name, full in {
        "tokens": plan.tokens == most.tokens,
        "rows": len(plan.rows) == most.rows,
        "logits": logits == most.logits,
        "scores of several": len(scored) > 1,
        "long prompts of several": sum(len(row.tokens) > 12 for row in plan.rows) > 1,
    }.items():
        REACHED[name] = REACHED.get(name, 0) + full


def test_the_bound_is_reached() -> None:
    """It is no larger than needed: each part of it is what some step is."""
    if not REACHED:
        for seed in SEEDS:
            test_no_step_is_larger_than_the_bound(seed)
    assert min(REACHED.values()) > 0, REACHED


def test_sessions_at_rest_make_no_step_larger() -> None:
    """They run on, with nothing to compute: a chosen budget goes by those that compute."""
    rig = Rig(600, 4, max_running=4, context=CONTEXT, audited=False)
    rig.engine.budget = TokenBudget()
    scheduler, given, decide = rig.engine.scheduler, [], rig.engine.scheduler.decide
    scheduler.decide = lambda now, budget: given.append(budget) or decide(now, budget)  # type: ignore[func-returns-value]
    rig.add(ids(9), 4)
    for i in range(4500):
        sequence = rig.engine.rest(rig.intake.tokens([i % VOCAB]), b"", "")
        rig.kv.open(sequence)
        sequence.become(State.RUNNING)
        scheduler.running.append(sequence)
    scheduler.waiting[:] = [sequence for sequence in scheduler.waiting if not sequence.parked]
    for _ in range(3):
        rig.engine.step()
    assert len(given) >= 3 and max(given) <= largest_step(EngineConfig(max_running=4), CONTEXT, SCORES).tokens


@pytest.mark.parametrize("seed", range(40))
def test_attention_has_no_more_pieces_than_there_is_room_for(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of random steps within the bound, with little scratch and with much."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from octavo.kernels.triton import attention
    from octavo.kernels.triton.inputs import Sizes, prepare

    rng = np.random.default_rng(seed)
    monkeypatch.setattr(attention, "SPLIT", int(rng.choice([64, 256, 1024])))
    monkeypatch.setattr(attention, "SCRATCH", int(rng.choice([100, 3000, 1 << 15])))
    monkeypatch.setattr(attention, "ENOUGH", int(rng.choice([0, 256, 10**6])))
    kv_heads, share = int(rng.choice([1, 2])), int(rng.choice([1, 3, 4, 7, 64, 71]))
    windows = (None, int(rng.choice([1, 63, 64, 300, 5000])))
    groups = tuple(LayerGroup(window, (i,)) for i, window in enumerate(windows))
    layout = KVLayout(int(rng.choice([1, 16, 48])), kv_heads, 16, "float16", groups)
    rows, context = int(rng.integers(1, 20)), int(rng.choice([1, 64, 1000, 9000]))
    lengths = np.minimum(np.where(rng.random(rows) < 0.6, 1, rng.integers(1, 400, rows)), context)
    most = LargestStep(int(lengths.sum()), rows, rows, context)
    ends = np.where(rng.random(rows) < 0.5, context, rng.integers(lengths, context + 1))
    batch = batch_of(lengths, ends, layout)
    bound = Sizes.of(most, layout, kv_heads * share)
    found = prepare(batch, layout, kv_heads * share).sizes
    assert bound.hold(found)
    if all(ends == context) and all(lengths == 1) and attention.SCRATCH == 1 << 15 and not share > 64:
        assert bound == found


def batch_of(lengths: Any, ends: Any, layout: KVLayout) -> Batch:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions = np.concatenate([np.arange(e - n, e) for n, e in zip(lengths, ends, strict=True)]).astype(np.int32)
    held = -(-ends // layout.block_size)
    offsets = np.concatenate([[0], np.cumsum(held)]).astype(np.int32)
    tables = [(np.zeros(offsets[-1], np.int32), offsets) for _ in layout.groups]
    return Batch(np.zeros(starts[-1], np.int32), positions, starts, tables, starts[1:] - 1)
