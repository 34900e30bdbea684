"""Same request, same bytes: whatever load it runs in, a request's answer is the one that it gets alone.

Loads are drawn by seed: pools that force preemption, chunks, block sizes, windows, forks, aborts, priorities, salts,
scoring, arrivals in the middle, drafts right and wrong, a hash that collides.  The scripted executor's next token
depends on every token of the prefix as the blocks hold it, so a block that is shared, copied, evicted or published
wrongly changes the answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from engines import Rig, answer, ids, six_bits, solo
from octavo.core.request import Request
from octavo.errors import RequestError
from octavo.paging.prefix import chain_hash


@dataclass
class Load:
    """An engine's settings, and requests with the step in which each arrives and, perhaps, is aborted."""

    rig: dict[str, Any]
    requests: list[tuple[int, int | None, list[int], int, dict[str, Any]]]


@dataclass
class Happened:
    """How often what really happened, over all loads."""

    times: dict[str, int] = field(default_factory=dict)

    def add(self, what: str, times: int) -> None:
        self.times[what] = self.times.get(what, 0) + times


HAPPENED = Happened()
SEEDS = 90


def draw(seed: int) -> Load:
    rng = random.Random(seed)
    windows = rng.choice([(None,), (None,), (None, 8), (3, None, 12), (6,), (1, None), (2, 2)])
    size = rng.choice([1, 2, 3, 4, 8, 16])
    tokens = rng.choice([30, 40, 60, 100])  # that one layer group holds
    rig = {
        "pool": max(3, tokens // size) * len(windows),
        "block_size": size,
        "budget": rng.choice([1, 2, 3, 7, 16, 64, 300]),
        "windows": windows,
        "max_running": rng.choice([1, 2, 5, 64]),
        "policy": rng.choice(["fcfs", "priority"]),
        "hash": rng.choice([chain_hash, chain_hash, six_bits]),
        "prefix_cache": rng.random() < 0.9,
        "drafts": (0, 0, 2, 0, 0, 9)[seed % 6],
        "ahead": seed % 3 == 0,
    }
    prefixes = [ids(rng.randint(1, 24), s) for s in range(3)]
    requests = []
    step = 0
    for _ in range(rng.randint(1, 40)):
        step += rng.choice([0, 0, 0, 1, 2, 10])
        abort = step + rng.randint(0, 15) if rng.random() < 0.1 else None
        prompt = rng.choice(prefixes) + ids(rng.randint(0, 12), rng.randrange(4))
        most = rng.choice([1, 2, 5, 12, 24])
        given: dict[str, Any] = {
            "n": rng.choice([1, 1, 1, 1, 2, 3, 6]),
            "seed": rng.randrange(3),
            "temperature": rng.choice([0.0, 1.0]),
            "priority": rng.randrange(3),
            "cache_salt": rng.choice([None, None, "a", "b"]),
            "logprobs": rng.choice([None, 0, 2]),
        }
        if rng.random() < 0.15:
            given["prompt_logprobs"] = rng.randrange(3)
            most = rng.choice([0, most])
        if rng.random() < 0.3:
            given["stop_token_ids"] = [rng.randrange(97) for _ in range(20)]
            given["min_tokens"] = rng.randrange(most + 1)
        requests.append((step, abort, prompt, most, given))
    return Load(rig, requests)


def play(load: Load) -> list[tuple[Request, list[int], int, dict[str, Any]]]:
    """Runs a load to its end; the requests that were let in."""
    rig = Rig(**load.rig)
    let_in: list[tuple[Request, list[int], int, dict[str, Any]]] = []
    aborts: list[tuple[int, Request]] = []
    for step, abort, prompt, most, given in load.requests:
        while rig.clock.now() < step and rig.engine.busy:
            _one_step(rig, aborts)
        rig.clock.time = max(rig.clock.time, step)
        try:
            request = rig.add(prompt, most, **given)
        except RequestError as error:
            assert "exceed" in str(error)
            HAPPENED.add("refused", 1)
            continue
        let_in.append((request, prompt, most, given))
        if abort is not None:
            aborts.append((abort, request))
    while rig.engine.busy:
        _one_step(rig, aborts)
    rig.run()
    counters = rig.engine.stats().counters
    names = ("preemptions", "copies", "evictions", "cached_tokens", "aborted", "finished", "steps_ahead")
    for name in (*names, *(("drafted_tokens", "accepted_tokens") if load.rig["drafts"] else ())):
        HAPPENED.add(name, getattr(counters, name))
    HAPPENED.add("deferred", rig.deferred)
    HAPPENED.add("forked", sum(len(r.branches) - 1 for r, *_ in let_in))
    HAPPENED.add("preempted while scoring", sum(r.preemptions for r, *_ in let_in if r.scores))
    return let_in


def _one_step(rig: Rig, aborts: list[tuple[int, Request]]) -> None:
    for when, request in aborts:
        if when <= rig.clock.now() and not request.finished:
            rig.engine.abort(request)
            assert all(s.number not in rig.kv.holdings for s in request.branches), "an aborted request holds blocks"
    if rig.engine.busy:
        rig.step()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_same_bytes_under_any_load(seed: int) -> None:
    load = draw(seed)
    for request, prompt, most, given in play(load):
        inner = {k: v for k, v in given.items() if k not in ("priority", "cache_salt")}
        want, got = answer(solo(prompt, most, windows=load.rig["windows"], **inner)), answer(request)
        aborted = any(s.finish_reason == "abort" for s in request.branches)
        if not aborted:
            assert got == want, f"seed {seed}: {request.id} differs from the same request alone"
            assert len(request.branches) == given["n"]
            if "prompt_logprobs" in given:
                assert len(request.scores) == len(prompt) - 1
        for tokens, whole in zip(got["tokens"], want["tokens"], strict=False):
            assert tokens == whole[: len(tokens)], f"seed {seed}: what {request.id} had when aborted is wrong"


def test_the_loads_are_hard() -> None:
    """Runs last: the loads above did force all that a request must not notice."""
    if HAPPENED.times.get("finished", 0) < SEEDS:
        for seed in range(0, SEEDS, 5):
            play(draw(seed))
    few = {k: HAPPENED.times.get(k, 0) for k in sorted(HAPPENED.times) if HAPPENED.times.get(k, 0) < 20}
    assert not few, f"hardly ever happened: {few} of {HAPPENED.times}"
    assert HAPPENED.times["preemptions"] > 200 and HAPPENED.times["copies"] > 200, HAPPENED.times
