"""Same request, same bytes, on the real kernels: tokens and log-probabilities are equal (==) to the request's alone.

Each load is drawn: the model, how K and V are stored, block and chunk sizes, one or two threads, a pool that forces
preemption, arrivals, forks, aborts, scoring, drafts; the request alone runs in one chunk on one thread with caching
off.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

import real
import tiny
from conftest import TinyModels
from engines import answer
from octavo.core.request import Request
from octavo.engine.build import Parts
from octavo.errors import RequestError

# family, storage type; float weights know one path, quantised ones an exact and a fast one
MODELS = (
    ("llama", "F32"),
    ("llama", "Q8_0"),
    ("qwen3", "Q4_0"),
    ("mistral", "F16"),
    ("gemma3", "F32"),
    ("llama", "Q4_K"),
)
SEEDS = range(36)
HAPPENED: dict[str, int] = {}


@cache
def solo(models: TinyModels, family: str, type: str, dtype: str, compute: str) -> real.Solo:
    return real.Solo(path(models, family, type), kv_dtype=dtype, compute=compute)


def path(models: TinyModels, family: str, type: str) -> Any:
    return models.folder(family, type) if type in ("F32", "F16") else models.gguf(family, type)


def settings(rng: random.Random, groups: int) -> dict[str, Any]:
    size = rng.choice([1, 4, 5, 16, 32])
    return {
        "block_size": size,
        "kv_blocks": max(4, rng.choice([100, 180, 400]) // size) * groups,
        "max_batched_tokens": rng.choice([1, 5, 16, 17, 64, 512]),
        "max_running": rng.choice([1, 4, 64]),
        "threads": rng.choice([1, 1, 2]),
        "prefix_cache": rng.random() < 0.85,
    }


def requests(rng: random.Random) -> list[tuple[list[int], int, dict[str, Any]]]:
    heads = [tiny.prompt(rng.randint(1, 50), 500 * i) for i in range(3)]
    out = []
    for _ in range(rng.choice([1, 4, 10, 25, 40])):
        prompt = rng.choice(heads) + tiny.prompt(rng.randint(0, 20), 100 * rng.randrange(5))
        most = rng.choice([1, 4, 12, 24])
        given: dict[str, Any] = {"n": rng.choice([1, 1, 1, 2, 4]), "seed": rng.randrange(4)}
        given["temperature"] = rng.choice([0.0, 0.9])
        if rng.random() < 0.2:
            given.update(repetition_penalty=1.2, presence_penalty=0.5, top_k=40, top_p=0.95, min_p=0.01)
        if rng.random() < 0.15:
            given["prompt_logprobs"] = rng.randrange(3)
        out.append((prompt, most, given))
    return out


def play(parts: Parts, load: list[tuple[list[int], int, dict[str, Any]]], rng: random.Random) -> list[Request | None]:
    """Requests arrive while others run; some are aborted.  None for those that can never fit."""
    out: list[Request | None] = []
    for prompt, most, given in load:
        for _ in range(rng.choice([0, 0, 1, 3])):
            parts.engine.step()
        try:
            out.append(real.add(parts, prompt, most, priority=rng.randrange(3), **given))
        except RequestError as error:
            assert "exceed" in str(error)
            out.append(None)
        if rng.random() < 0.08:
            victim = rng.choice(out)
            if victim is not None:
                parts.engine.abort(victim)
    real.finish(parts)
    return out


@pytest.mark.parametrize("seed", SEEDS)
def test_same_bytes_on_the_kernels(seed: int, tiny_models: TinyModels) -> None:
    rng = random.Random(seed)
    family, type = MODELS[seed % len(MODELS)]
    dtype, compute = rng.choice(["float16", "float32", "bfloat16", "int8"]), rng.choice(["fast", "exact"])
    alone = solo(tiny_models, family, type, dtype, compute)
    load = requests(rng)
    groups = 6 if family == "gemma3" else 1
    with real.engine(
        path(tiny_models, family, type),
        kv_dtype=dtype,
        compute=compute,
        policy=rng.choice(["fcfs", "priority"]),
        **settings(rng, groups),
    ) as parts:
        parts.engine.ahead = seed % 4 == 0
        if seed % 2:
            answers = [(p, alone.answer(p, most, **given)) for p, most, given in load]
            texts = [p + list(tokens) for p, known in answers for tokens in known["tokens"]]
            parts.engine.drafter = real.Recalled(texts, 1 + seed % 7)
        for request, (prompt, most, given) in zip(play(parts, load, rng), load, strict=True):
            if request is not None and not any(s.finish_reason == "abort" for s in request.branches):
                assert answer(request) == alone.answer(prompt, most, **given), f"seed {seed}: {request.id}"
        counters = parts.engine.stats().counters
    names = ("preemptions", "copies", "evictions", "cached_tokens", "aborted", "finished")
    for name in (*names, *(("drafted_tokens", "accepted_tokens") if seed % 2 else ("steps_ahead",))):
        HAPPENED[name] = HAPPENED.get(name, 0) + getattr(counters, name)


def test_the_loads_are_hard(tiny_models: TinyModels) -> None:
    """The loads above did preempt, copy, evict, hit and abort."""
    if HAPPENED.get("finished", 0) < len(SEEDS):
        for seed in SEEDS:
            test_same_bytes_on_the_kernels(seed, tiny_models)
    assert min(HAPPENED.values()) > 10, HAPPENED


@pytest.mark.parametrize(("family", "type"), [("llama", "Q8_0"), ("mistral", "F32"), ("gemma3", "F32")])
@pytest.mark.parametrize("compute", ["fast", "exact"])
def test_every_way_of_cutting(family: str, type: str, compute: str, tiny_models: TinyModels) -> None:
    """R66: one prompt in chunks of 1, 7, B, B+1 and whole, in blocks of many sizes, on 1 and 2 threads."""
    prompt = tiny.prompt(150)
    for dtype in ("float16", "float32", "int8"):
        want = solo(tiny_models, family, type, dtype, compute).answer(prompt, 16, prompt_logprobs=2)
        assert len(want["scores"]) == 149 and len(want["tokens"][0]) == 16
        for size in (1, 7, 16, 64):
            for chunk, threads in ((1, 1), (7, 2), (size, 1), (size + 1, 2), (1000, 2)):
                with real.engine(
                    path(tiny_models, family, type),
                    kv_blocks=1200,
                    kv_dtype=dtype,
                    compute=compute,
                    block_size=size,
                    max_batched_tokens=chunk,
                    threads=threads,
                    audit=False,
                ) as parts:
                    request = real.add(parts, prompt, 16, prompt_logprobs=2)
                    real.finish(parts)
                    assert answer(request) == want, f"{dtype}, blocks of {size}, chunks of {chunk}, {threads} threads"
