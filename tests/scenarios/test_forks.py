"""Branches of one prompt: which blocks they share, when one is copied, and that each computes what it would alone."""

from __future__ import annotations

import pytest

import real
import tiny
from conftest import TinyModels
from engines import Rig, alone, ids, outputs


@pytest.mark.parametrize("length", [11, 12, 13, 30])
@pytest.mark.parametrize(("family", "backend"), [("llama", "cpu"), ("gemma3", "cpu"), ("llama", "reference")])
def test_r30_branches_equal_a_run_forced_along_their_tokens(
    length: int, family: str, backend: str, tiny_models: TinyModels
) -> None:
    """R30: prompts of kB-1, kB, kB+1 tokens, five branches: the log-probabilities along each are a scoring run's."""
    prompt = tiny.prompt(length)
    with real.engine(tiny_models.folder(family), block_size=4, kv_blocks=600, backend=backend) as parts:
        request = real.add(parts, prompt, 12, n=5, temperature=1.0, seed=3, logprobs=0)
        real.finish(parts)
        assert len({tuple(t) for t in outputs(request)}) == 5
        assert parts.engine.stats().counters.copies == (0 if length % 4 == 0 else 4 * parts.engine.kv.groups)
        for tokens, reader in zip(outputs(request), request.readers, strict=True):
            forced = real.add(parts, prompt + tokens, 0, prompt_logprobs=0, logprobs=None)
            real.finish(parts)
            assert [s.logprob for s in forced.scores[length - 1 :]] == [s.logprob for s in reader.logprobs]


@pytest.mark.parametrize("pool", [8, 12, 16])
def test_r30_under_preemption(pool: int, tiny_models: TinyModels) -> None:
    """R30: the same branches when the pool is too small for them."""
    prompt = tiny.prompt(13)
    with real.engine(tiny_models.folder("llama"), block_size=4) as parts:
        want = real.add(parts, prompt, 12, n=5, temperature=1.0, seed=3)
        real.finish(parts)
    with real.engine(tiny_models.folder("llama"), block_size=4, kv_blocks=pool) as parts:
        got = real.add(parts, prompt, 12, n=5, temperature=1.0, seed=3)
        real.finish(parts)
        assert got.preemptions > 0
    assert outputs(got) == outputs(want)
    assert [r.logprobs for r in got.readers] == [r.logprobs for r in want.readers]


@pytest.mark.parametrize(("length", "shared", "copies"), [(39, 9, 7), (40, 10, 0), (41, 10, 7)])
@pytest.mark.parametrize("groups", [1, 2])
def test_forks_share_the_prompt(length: int, shared: int, copies: int, groups: int) -> None:
    """n = 8: blocks used are the shared and the private ones; a tail is copied on the first write but by its last."""
    rig = Rig(pool=200 * groups, block_size=4, budget=64, windows=(None,) * groups)
    request = rig.add(ids(length), 6, n=8, temperature=1.0, seed=2)
    rig.step()
    before = rig.engine.stats()
    assert before.blocks_used == -(-length // 4) * groups and before.blocks_shared == before.blocks_used
    assert before.counters.copies == 0, "nothing is copied before it is written"
    rig.step()
    after = rig.engine.stats()
    assert after.counters.copies == copies * groups
    assert after.blocks_shared == shared * groups and after.blocks_used == (shared + 8) * groups
    rig.steps(2)
    assert rig.engine.stats().counters.copies == copies * groups, "a private block was copied"
    rig.run()
    assert outputs(request) == alone(ids(length), 6, n=8, temperature=1.0, seed=2)


def test_the_last_holder_writes_in_place() -> None:
    """When the other branches have gone, the tail is no longer shared and needs no copy."""

    def choose(prefix: object, draw: object) -> int:
        return 5 if draw.branch == 0 else 2  # type: ignore[attr-defined]

    rig = Rig(block_size=4, choose=choose, eos_ids=(2,))
    request = rig.add(ids(6), 4, n=3, temperature=1.0)
    rig.run()
    assert [len(o) for o in outputs(request)] == [4, 1, 1]
    assert rig.engine.stats().counters.copies == 0


def test_a_branch_beyond_max_running_starts_later() -> None:
    """Branches that may not run yet wait empty-handed and hit the prompt's blocks when their turn comes."""
    rig = Rig(pool=40, block_size=4, budget=64, max_running=2)
    request = rig.add(ids(17), 5, n=6, temperature=1.0, seed=1)
    rig.step()
    assert len(rig.engine.scheduler.running) == 2 and len(rig.engine.scheduler.waiting) == 4
    rig.run()
    assert outputs(request) == alone(ids(17), 5, n=6, temperature=1.0, seed=1)
    assert request.cached == 0, "a branch's own prompt is no hit"
    assert rig.computed() == 17 + 2 * 4 + 4 * (18 - 16 + 4 - 1), "the prompt was computed again"


@pytest.mark.parametrize("n", [1, 4])
def test_abort_gives_back_every_block_at_once(n: int) -> None:
    """At any moment: waiting, in the middle of the prompt, just forked, decoding; the others do not notice."""
    steps = 0
    while True:
        rig = Rig(pool=16, block_size=4, budget=6)
        other = rig.add(ids(9, 1), 8)
        request = rig.add(ids(15, 2), 6, n=n, temperature=1.0, seed=1)
        late = rig.add(ids(5, 3), 3)
        rig.steps(steps)
        if request.finished:
            break
        numbers = [s.number for s in request.branches]
        rig.engine.abort(request)
        assert not any(number in rig.kv.holdings for number in numbers)
        assert all(s.finish_reason is not None for s in request.branches) and request.finished
        rig.engine.abort(request)  # twice is once
        rig.run()
        assert outputs(other) == alone(ids(9, 1), 8) and outputs(late) == alone(ids(5, 3), 3)
        assert rig.engine.stats().counters.aborted == 1
        steps += 1
    assert steps > 8


def test_a_scoring_request_with_branches_ends() -> None:
    """max_tokens 0 with n = 3: nothing is drawn, and all three branches end."""
    rig = Rig()
    request = rig.add(ids(9), 0, n=3, prompt_logprobs=1)
    rig.run()
    assert request.finished and [s.finish_reason for s in request.branches] == ["length"] * 3
    assert len(request.scores) == 8 and outputs(request) == [[]] * 3
