"""Beams in a pool: what they share, what they copy, how they come back, what they refuse.  Cases R30, R31, R73."""

from __future__ import annotations

import random
from typing import Any

import pytest

import real
import tiny
from conftest import TinyModels
from engines import Rig, alone, answer, ids, outputs
from octavo import LLM
from octavo.core.request import Request
from octavo.engine.build import Parts
from octavo.errors import RequestError
from octavo.paging.audit import audit_idle


def beam_request(parts: Parts, prompt: list[int], width: int, most: int) -> Request:
    request = parts.intake.beam_search(prompt, width=width, max_tokens=most, ignore_eos=True)
    parts.engine.add(request)
    return request


def found(request: Request) -> list[tuple[tuple[int, ...], float]]:
    return [(h.tokens, h.score) for h in request.beams.search.finished]


@pytest.mark.parametrize("length", [11, 12, 13, 30])
@pytest.mark.parametrize(
    ("family", "groups", "backend"), [("llama", 1, "cpu"), ("gemma3", 6, "cpu"), ("llama", 1, "reference")]
)
def test_r30_each_beam_is_a_run_forced_along_its_tokens(
    length: int, family: str, groups: int, backend: str, tiny_models: TinyModels
) -> None:
    """R30: prompts of kB-1, kB, kB+1: a beam's score is the sum of the log-probabilities of its tokens, scored."""
    prompt = tiny.prompt(length)
    with real.engine(tiny_models.folder(family), block_size=4, kv_blocks=200 * groups, backend=backend) as parts:
        request = beam_request(parts, prompt, 4, 8)
        real.finish(parts)
        audit_idle(parts.engine.kv)
        best = found(request)
        assert len({tokens for tokens, _ in best}) == 4 and parts.engine.stats().counters.copies > 0
        for tokens, score in best:
            forced = real.add(parts, prompt + list(tokens), 0, prompt_logprobs=0, logprobs=None)
            real.finish(parts)
            logprobs = [s.logprob for s in forced.scores[length - 1 :]]
            total = 0.0
            for value in logprobs:
                total += value
            assert score == total / 8


@pytest.mark.parametrize("swap", [0, "1MiB"])
@pytest.mark.parametrize("preempt", ["swap", "recompute"])
@pytest.mark.parametrize("length", [11, 12, 13])
def test_r30_under_forced_preemption(length: int, swap: Any, preempt: str, tiny_models: TinyModels) -> None:
    """R30: beams of width 4 and an n=5 request, thrown out at random moments, are what they were."""
    path, prompt = tiny_models.folder("llama"), tiny.prompt(length)
    sampled: dict[str, Any] = {"n": 5, "temperature": 1.0, "seed": 3}
    with real.engine(path, block_size=4) as parts:
        beam = beam_request(parts, prompt, 4, 8)
        real.finish(parts)
        want = found(beam)
    alone_five = real.Solo(path).answer(prompt, 8, **sampled)
    rng = random.Random(length)
    with real.engine(path, block_size=4, kv_blocks=24, swap_memory=swap, preempt=preempt) as parts:
        engine = parts.engine
        beam, five = beam_request(parts, prompt, 4, 8), real.add(parts, prompt, 8, **sampled)
        while engine.busy:
            engine.step()
            if engine.scheduler.running and rng.random() < 0.7:
                engine.scheduler.preempt(rng.choice(engine.scheduler.running))
        assert engine.scheduler.preemptions > 2
        assert (engine.scheduler.swaps > 0) is (swap != 0 and preempt == "swap")
        audit_idle(engine.kv)
        assert found(beam) == want and answer(five) == alone_five


@pytest.mark.parametrize(("length", "tails"), [(12, 0), (13, 1)])
@pytest.mark.parametrize("groups", [1, 2])
def test_beams_share_their_prompt(length: int, tails: int, groups: int) -> None:
    """Full prompt blocks are shared by all beams; the stats say so; a tail is copied when it is first written."""
    rig = Rig(pool=100 * groups, block_size=4, budget=64, windows=(None,) * groups)
    request = rig.intake.beam_search(ids(length), width=4, max_tokens=6)
    rig.engine.add(request)
    rig.step()
    assert rig.engine.stats().counters.copies == 0, "nothing is copied before it is written"
    before = rig.engine.stats()
    assert before.blocks_shared == before.blocks_used == -(-length // 4) * groups
    rig.step()
    after = rig.engine.stats()
    # Those that went on have a tail of their own: one beam writes in place, the others copied.
    assert after.blocks_shared >= length // 4 * groups
    assert after.counters.copies >= 3 * tails * groups
    rig.run()
    assert rig.engine.stats().blocks_used == 0 and len(found(request)) == 4


def test_beams_that_die_free_their_tails() -> None:
    """While four beams run, they hold the prompt once and four tails, never more."""
    rig = Rig(pool=100, block_size=4, budget=64)
    request = rig.intake.beam_search(ids(40), width=4, max_tokens=20)
    rig.engine.add(request)
    most = 0
    while rig.engine.busy:
        rig.step()
        used = rig.engine.stats().blocks_used
        assert len(rig.engine.scheduler.running) <= 4
        most = max(most, used)
    assert 10 < most <= 10 + 4 * 5
    assert request.finished and rig.kv.pool.free == 100


def test_beams_that_no_longer_share_find_room() -> None:
    """With caching off, preempted beams come back without shared blocks: the pool still serves them one by one."""
    for policy in ("fcfs", "fair"):
        rig = Rig(pool=12, block_size=4, prefix_cache=False, max_running=1, policy=policy)
        request = rig.intake.beam_search(ids(16), width=4, max_tokens=6)
        rig.engine.add(request)
        while not request.finished and rig.clock.now() < 500:
            rig.step()
            for sequence in list(rig.engine.scheduler.running):
                if rig.clock.now() % 3 == 0:
                    rig.engine.scheduler.preempt(sequence)
        assert request.finished
        rig.run()
        free = Rig(pool=200, block_size=4, prefix_cache=False)
        want = free.intake.beam_search(ids(16), width=4, max_tokens=6)
        free.engine.add(want)
        free.run()
        assert found(request) == found(want)


def test_an_aborted_search_gives_all_back() -> None:
    for when in range(1, 9):
        rig = Rig(pool=40, block_size=4, swap=10, budget=7)
        request = rig.intake.beam_search(ids(13), width=4, max_tokens=10)
        other = rig.add(ids(9, 4), 8)
        rig.engine.add(request)
        rig.steps(when)
        if when % 2 and rig.engine.scheduler.running:
            rig.engine.scheduler.preempt(rig.engine.scheduler.running[-1])
        rig.engine.abort(request)
        assert request.finished
        assert all(s.number not in rig.kv.holdings and s.number not in rig.kv.saved for s in request.branches)
        rig.run()
        assert outputs(other) == alone(ids(9, 4), 8)


def test_a_failing_beam_fails_its_search_only() -> None:
    failing: list[int] = []
    rig = Rig(pool=60, block_size=4, fail=lambda row: "broken" if row.sequence in failing else None)
    request = rig.intake.beam_search(ids(13), width=4, max_tokens=10)
    rig.engine.add(request)
    other = rig.add(ids(9, 4), 8)
    rig.steps(3)
    failing.append(request.beams.sequences[2].number)
    rig.run()
    assert request.error == "broken" and outputs(other) == alone(ids(9, 4), 8)


# ---- bad input ------------------------------------------------------------------------------------------------------


def test_absurd_widths(tiny_models: TinyModels) -> None:
    with LLM(str(tiny_models.folder("llama")), kv_blocks=40, block_size=4, threads=1) as llm:
        for width in (0, -1, 257, 10**9, 2.0, True, "4", None):
            with pytest.raises(RequestError, match="width"):
                llm.beam_search([1, 2, 3], width)  # type: ignore[arg-type]
        for given, field in (
            ({"n": 5}, "n"),
            ({"n": 0}, "n"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": -3}, "max_tokens"),
            ({"length_penalty": float("nan")}, "length_penalty"),
            ({"length_penalty": "much"}, "length_penalty"),
            ({"early_stopping": "soon"}, "early_stopping"),
            ({"max_tokens": 100}, "width"),
        ):
            with pytest.raises(RequestError) as error:
                llm.beam_search([1, 2, 3], 4, **{"max_tokens": 5, **given})  # type: ignore[arg-type]
            assert error.value.field == field, given
        with pytest.raises(RequestError, match=r"width: 8 beams of 3 \+ 60 tokens can need 128 blocks.*has 40"):
            llm.beam_search([1, 2, 3], 8, 60)
        with pytest.raises(RequestError, match="exceed the"):
            llm.beam_search([1, 2, 3], 2, 2000)
        assert len(llm.beam_search([1, 2, 3], 4, 5, n=2)[0].outputs) == 2
        audit_idle(llm.parts.engine.kv)


# ---- R73: what a request is told of the cache -----------------------------------------------------------------------


@pytest.mark.parametrize("swap", [0, 50])
def test_r73_cached_tokens(swap: int) -> None:
    """R73: 100 tokens in blocks of 16: 0, then 96, also with n=2, also for beams."""
    rig = Rig(pool=60, block_size=16, budget=200, swap=swap)
    got = []
    for n in (1, 1, 2):
        got.append(rig.add(ids(100), 4, n=n))
        rig.run()
    beam = rig.intake.beam_search(ids(100), width=3, max_tokens=4)
    rig.engine.add(beam)
    rig.run()
    assert [r.cached for r in (*got, beam)] == [0, 96, 96, 96]
    assert rig.engine.stats().counters.cached_tokens == 3 * 96


@pytest.mark.parametrize("swap", [0, 50])
@pytest.mark.parametrize("when", [1, 2, 5])
def test_r73_own_blocks_are_no_hits(swap: int, when: int) -> None:
    """R73: a request that is preempted, and finds its own blocks again, is told of no hit."""
    rig = Rig(pool=60, block_size=16, budget=60, swap=swap)
    request = rig.add(ids(100), 8)
    rig.steps(when)
    rig.engine.scheduler.preempt(request.branches[0])
    rig.run()
    assert request.preemptions == 1 and request.cached == 0
    assert outputs(request) == alone(ids(100), 8)
    assert rig.engine.stats().counters.cached_tokens == 0
