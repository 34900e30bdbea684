"""Cases of the prefix cache: full hits, recycled blocks, cut-off prompts, prefixes that arrive together, collisions."""

from __future__ import annotations

import random
from typing import Any

import pytest

import real
import tiny
from conftest import TinyModels
from engines import Rig, alone, answer, ids, outputs, six_bits, solo
from octavo.core.request import Request
from octavo.engine.outputs import request_output
from octavo.errors import RequestError
from octavo.paging.prefix import PrefixIndex, chain_hash


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
def test_r01_a_fully_cached_prompt(length: int, tiny_models: TinyModels) -> None:
    """R01: a prompt of k*B tokens that is cached whole still has a token to compute, and its chain stays intact."""
    prompt = tiny.prompt(length)
    with real.engine(tiny_models.folder("llama")) as parts:
        answers = []
        for _ in range(3):
            request = real.add(parts, prompt, 8)
            real.finish(parts)
            answers.append(answer(request))
            assert request.cached <= length - 1
        assert request.cached == (length - 1) // 16 * 16
        assert answers[1] == answers[0] and answers[2] == answers[0]
        longer = real.add(parts, prompt + [5, 6], 1)
        real.finish(parts)
        assert longer.cached == length // 16 * 16, "the blocks of the prompt are not all cached any more"


def test_r02_recycled_blocks_lose_their_name() -> None:
    """R02: after other prompts have overwritten every block, a prompt is computed anew (each step checks the index)."""
    rig = Rig(pool=4, block_size=4)
    x, y, z = ids(9, 1), ids(11, 2), ids(10, 3)
    for prompt in (x, y, z, x, x):
        request = rig.add(prompt, 4)
        rig.run()
        assert outputs(request) == alone(prompt, 4)
        assert len(rig.kv.index) <= rig.kv.pool.size
    assert request.cached == 8


def test_r05_the_same_cold_prompt_four_times_at_once() -> None:
    """R05: four equal prompts in one step, and traffic that reuses freed blocks: the prefix is computed once."""
    rig = Rig(pool=40, block_size=4, budget=32)
    prompt = ids(64, 1)
    four = [rig.add(prompt, 12) for _ in range(4)]
    for i in range(12):
        rig.add(ids(10, 10 + i), 6)
    rig.run()  # audited: no table names a block of count 0
    assert [outputs(r) for r in four] == [alone(prompt, 12)] * 4


@pytest.mark.parametrize("length", [63, 64, 65, 200])
def test_a_prefix_that_arrives_32_times_is_computed_once(length: int) -> None:
    rig = Rig(pool=400, block_size=16, budget=100)
    prompt = ids(length, 1)
    requests = [rig.add(prompt, 4) for _ in range(32)]
    rig.run()
    shared = (length - 1) // 16 * 16  # what a hit may cover
    assert rig.computed() == shared + 32 * (length - shared + 3)
    assert all(outputs(r) == alone(prompt, 4) for r in requests)
    assert [r.cached for r in requests] == [0] + [shared] * 31
    assert (rig.deferred > 0) == (length < 100), "only where budget was left could anybody have to wait"


def test_followers_of_an_aborted_leader() -> None:
    """Sequences that wait for a block which another one computes go on when that one leaves."""
    for steps in range(1, 14):
        rig = Rig(pool=60, block_size=4, budget=8)
        prompt = ids(80, 1)
        leader, *followers = [rig.add(prompt, 3) for _ in range(5)]
        rig.steps(steps)
        rig.engine.abort(leader)
        rig.run()
        assert all(outputs(r) == alone(prompt, 3) for r in followers)


def test_r11_a_hit_is_not_counted_as_free() -> None:
    """R11: cached blocks in the free list cannot be both hit and reused: wait or refuse, the cached prefix lives on."""
    rig = Rig(pool=5, block_size=4)
    prompt = ids(12, 1)
    rig.add(prompt, 1)
    rig.run()
    with pytest.raises(RequestError, match="25 tokens exceed the 20 tokens"):
        rig.add(prompt + ids(12, 2), 1)
    holder = rig.add(ids(7, 3), 5)  # takes two blocks, then three, of the two that are empty
    rig.steps(1)
    second = rig.add(prompt + ids(4, 2), 4)  # three hits and two new blocks
    rig.run()
    assert outputs(holder) == alone(ids(7, 3), 5)
    assert outputs(second) == alone(prompt + ids(4, 2), 4)
    third = rig.add(prompt + [3], 1)
    rig.run()
    assert third.cached == 12 and outputs(third) == alone(prompt + [3], 1)


@pytest.mark.parametrize("chunks", [2, 5, 11])
@pytest.mark.parametrize("how", ["abort", "preempt", "fail"])
def test_r12_a_prompt_cut_off_while_it_is_read(chunks: int, how: str) -> None:
    """R12: what an aborted, preempted or failed prompt has published is right (each step compares it to the slots)."""
    broken: list[int] = []
    rig = Rig(pool=20, block_size=4, budget=4, fail=lambda row: "broken" if row.sequence in broken else None)
    prompt = ids(48, 1)
    first = rig.add(prompt, 4)
    rig.steps(chunks)
    named = sum(content is not None for content in rig.kv.pool.content)
    assert named == chunks, "each full block, and only full blocks, are published"
    if how == "abort":
        rig.engine.abort(first)
    elif how == "preempt":
        rig.engine.scheduler.preempt(first.branches[0])
    else:
        broken.append(first.branches[0].number)
        rig.steps(1)
        assert first.error == "broken"
        assert sum(content is not None for content in rig.kv.pool.content) == chunks, "a failed row was published"
    for i in range(3):
        rig.add(ids(20, 10 + i), 3)
        again = rig.add(prompt, 4)
        rig.run()
        assert outputs(again) == alone(prompt, 4)
    if how == "preempt":
        assert outputs(first) == alone(prompt, 4)


def test_r17_prompt_logprobs_take_no_hit(tiny_models: TinyModels) -> None:
    """R17: with chunks, a warm cache and any order there are 40 entries, the first empty, equal to those without."""
    prompt, other = tiny.prompt(40), tiny.prompt(32) + tiny.prompt(8, 900)

    def entries(parts: Any, tokens: list[int]) -> Any:
        request = real.add(parts, tokens, 2, prompt_logprobs=3)
        real.finish(parts)
        return request_output(request).prompt_logprobs

    with real.engine(tiny_models.folder("llama"), prefix_cache=False, max_batched_tokens=64) as parts:
        want, want_other = entries(parts, prompt), entries(parts, other)
    assert len(want) == len(want_other) == 40 and want[0] is None and all(len(e) >= 3 for e in want[1:])
    assert all(token in entry for token, entry in zip(prompt[1:], want[1:], strict=True))
    for order in ((prompt, prompt, other), (other, prompt, prompt), (prompt, other, prompt)):
        with real.engine(tiny_models.folder("llama"), max_batched_tokens=8) as parts:
            for tokens in order:
                assert entries(parts, tokens) == (want if tokens is prompt else want_other)
            plain = real.add(parts, prompt, 2)
            real.finish(parts)
            assert plain.cached == 32, "what a scored prompt computed can be hit by one that is not scored"


# ---- R34: collisions, depth, salts ----------------------------------------------------------------------------------


def play_colliding(hash: Any) -> list[tuple[Request, tuple[list[int], int]]]:
    rng = random.Random(34)
    rig = Rig(pool=30, block_size=2, budget=24, hash=hash)
    prefixes = [ids(rng.randint(4, 20), s) for s in range(6)]
    let_in = []
    for _ in range(120):
        prompt = rng.choice(prefixes)[: rng.randint(1, 20)] + ids(rng.randint(0, 6), rng.randrange(5))
        let_in.append((rig.add(prompt, 6), (prompt, 6)))
        rig.steps(rng.randint(0, 4))
    rig.run()
    return let_in


def test_r34_a_hash_of_six_bits() -> None:
    """R34: when keys collide all the time, tokens decide, and nobody gets another prompt's blocks."""
    hits = {}
    for hash in (six_bits, chain_hash):
        for request, (prompt, most) in play_colliding(hash):
            assert outputs(request) == alone(prompt, most)
            hits[hash] = hits.get(hash, 0) + request.cached
    assert 0 < hits[six_bits] < hits[chain_hash], "the weak hash did not collide, or nothing was ever hit"


def test_r34_a_constant_hash() -> None:
    """R34: even if all keys are one, a hit is only where chain, depth and tokens agree."""
    for request, (prompt, most) in play_colliding(lambda parent, tokens: b"k"):
        assert outputs(request) == alone(prompt, most)


def test_r34_an_equal_block_at_another_depth() -> None:
    """R34: the same four tokens again, one block further on, are no hit: other positions, other keys and values."""
    rig = Rig(pool=20, block_size=4)
    block = [1, 2, 3, 4]
    rig.add(block + [9], 1)
    rig.run()
    deeper = rig.add([5, 6, 7, 8] + block + [9], 1)
    twice = rig.add(block + block + [9], 1)
    rig.run()
    assert deeper.cached == 0 and twice.cached == 4
    assert outputs(deeper) == alone([5, 6, 7, 8] + block + [9], 1)
    assert outputs(twice) == alone(block + block + [9], 1)


def test_r34_salts_separate_fully() -> None:
    """R34: no hit across salts, none between a salt and no salt, and a salt's text is never another key's."""
    rig = Rig(pool=100, block_size=4)
    prompt = ids(21, 1)
    salts = [None, "a", "b", "", "user:a", "salt:a"]
    for salt in salts:
        request = rig.add(prompt, 2, cache_salt=salt)
        rig.run()
        assert request.cached == 0, f"salt {salt!r} was served another salt's blocks"
    for salt in salts:
        request = rig.add(prompt, 2, cache_salt=salt)
        rig.run()
        assert request.cached == 20 and outputs(request) == alone(prompt, 2)
    index = PrefixIndex(1)
    assert index.root_key(b"user:a") != index.root_key(b"a") != index.key(b"", ids_array("a"))


def ids_array(text: str) -> Any:
    from array import array

    return array("i", text.encode().ljust(4, b"\0"))


def test_salts_leave_nothing_behind() -> None:
    """Memory is flat however many salts come by: what is evicted takes its salt with it."""
    rig = Rig(pool=6, block_size=4)
    for i in range(300):
        rig.add(ids(9, i), 2, cache_salt=f"user {i}")
        rig.run()
    assert len(rig.kv.index.roots()) <= rig.kv.pool.size
    rig.kv.reset_cache()
    assert not rig.kv.index.roots() and not rig.kv.index.nodes()


def test_scoring_reads_the_same_whatever_came_before() -> None:
    """A scored prompt that is preempted in the middle scores each token once."""
    want = answer(solo(ids(30, 5), 6, prompt_logprobs=1))
    for steps in range(1, 10):
        rig = Rig(pool=12, block_size=4, budget=6)
        request = rig.add(ids(30, 5), 6, prompt_logprobs=1)
        rig.steps(steps)
        rig.engine.scheduler.preempt(request.branches[0])
        rig.run()
        assert answer(request) == want and request.preemptions == 1


def test_reset_while_sequences_live() -> None:
    """Forgetting the cache takes no block from a sequence, and what it publishes later is found."""
    rig = Rig(pool=40, block_size=4, budget=8)
    prompt = ids(40, 1)
    first = rig.add(prompt, 6)
    rig.steps(3)
    rig.kv.reset_cache()
    second = rig.add(prompt, 6)
    rig.run()
    assert outputs(first) == outputs(second) == alone(prompt, 6)
    third = rig.add(prompt, 6)
    rig.run()
    assert third.cached == 36 and outputs(third) == outputs(first)
