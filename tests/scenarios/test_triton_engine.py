"""The whole engine on Triton's kernels: what the C++ kernels answer, and the same bytes under any load.

In the interpreter (a step takes a second there, so models and loads are small); on a GPU where there is one.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import real  # noqa: E402
import tiny  # noqa: E402
from conftest import TinyModels  # noqa: E402
from engines import answer  # noqa: E402
from octavo.core.request import Request  # noqa: E402
from octavo.errors import RequestError  # noqa: E402

TRITON = {"backend": "triton", "device": "cuda" if torch.cuda.is_available() else "cpu"}
CPU = {"backend": "cpu", "device": "cpu", "compute": "exact"}

# family, type of the weights, of the cache, and how much nearer than the next the best token's logit must be to count:
# activations are rounded to the weights' 16 bits before products, and small integers meet them in bfloat16
ANSWERS = (
    ("llama-untied", "F32", "float32", 1e-3),
    ("llama-bias", "F16", "float16", 2e-2),
    ("llama-yarn-factor", "Q8_0", "float16", 0.3),
    ("mistral", "BF16", "bfloat16", 0.1),
    ("qwen2", "F32", "float32", 1e-3),
    ("qwen3", "F16", "float16", 2e-2),
    ("gemma3-softcap", "F32", "float16", 2e-2),
    ("llama", tiny.MIXED, "float16", 0.3),
)


def path(models: TinyModels, family: str, type: str) -> Path:
    return models.folder(family, type) if type in ("F32", "F16", "BF16") else models.gguf(family, type)


def greedy(model: Path, **settings: Any) -> list[Request]:
    with real.engine(model, max_batched_tokens=32, **settings) as parts:
        requests = [real.add(parts, tiny.prompt(n, 50 * n), 8) for n in (30, 1, 21)]
        real.finish(parts)
    return requests


@pytest.mark.parametrize("family, type, dtype, near", ANSWERS)
def test_answers_what_the_cpp_kernels_answer(
    family: str, type: str, dtype: str, near: float, tiny_models: TinyModels
) -> None:
    """Greedy tokens are equal up to the first that nearly ties with another."""
    model = path(tiny_models, family, type)
    compared = 0
    for ours, theirs in zip(greedy(model, kv_dtype=dtype, **TRITON), greedy(model, kv_dtype=dtype, **CPU), strict=True):
        assert ours.error is None
        found, right = answer(ours), answer(theirs)
        for i, token in enumerate(right["tokens"][0]):
            best = right["logprobs"][0][i].best
            if best[0][1] - best[1][1] < near:
                break
            assert found["tokens"][0][i] == token
            assert abs(found["logprobs"][0][i].logprob - right["logprobs"][0][i].logprob) < near
            compared += 1
    assert compared >= 6, "too few tokens stood out to be compared"


# ---- same request, same bytes ----------------------------------------------------------------------------------------

MODELS = (("llama", "F16", "float16"), ("gemma3", "F32", "float32"), ("qwen3", "Q4_0", "fp8"))
HAPPENED: dict[str, int] = {}
SEEDS = range(3)


@cache
def solo(models: TinyModels, family: str, type: str, dtype: str) -> real.Solo:
    return real.Solo(path(models, family, type), kv_dtype=dtype, **TRITON)


def load(rng: random.Random) -> list[tuple[list[int], int, dict[str, Any]]]:
    head = tiny.prompt(rng.randint(10, 40))
    out = []
    for i in range(rng.choice([3, 4])):
        prompt = head[: rng.randint(1, len(head))] + tiny.prompt(rng.randint(8, 20), 100 * i)
        given: dict[str, Any] = {"n": rng.choice([1, 1, 2]), "seed": i, "temperature": rng.choice([0.0, 0.9])}
        if i == 0:
            given["prompt_logprobs"] = 1
        out.append((prompt, rng.choice([4, 7]), given))
    return out


@pytest.mark.parametrize("seed", SEEDS)
def test_same_bytes_on_triton(seed: int, tiny_models: TinyModels) -> None:
    """Preempted, chunked, forked, with drafts right and wrong: each answer is, bit for bit, the one got alone."""
    rng = random.Random(seed)
    family, type, dtype = MODELS[seed % len(MODELS)]
    alone = solo(tiny_models, family, type, dtype)
    requests = load(rng)
    size = rng.choice([4, 16])
    settings = {
        "kv_blocks": 80 // size * (6 if family == "gemma3" else 1),
        "block_size": size,
        "max_batched_tokens": rng.choice([7, 24, 100]),
        "max_running": rng.choice([4, 8]),
        "policy": "priority",
    }
    with real.engine(path(tiny_models, family, type), kv_dtype=dtype, **TRITON, **settings) as parts:
        if seed % 2:
            known = [(p, alone.answer(p, most, **given)) for p, most, given in requests]
            texts = [p + list(tokens) for p, answers in known for tokens in answers["tokens"]]
            parts.engine.drafter = real.Recalled(texts, 4)
        parts.engine.ahead = True  # but with drafts
        added: list[Request | None] = []
        for i, (prompt, most, given) in enumerate(requests):
            try:
                added.append(real.add(parts, prompt, most, priority=-i, **given))
            except RequestError:
                added.append(None)
            for _ in range(3):
                parts.engine.step()
        real.finish(parts)
        for request, (prompt, most, given) in zip(added, requests, strict=True):
            if request is not None:
                assert answer(request) == alone.answer(prompt, most, **given), f"seed {seed}: {request.id}"
        counters = parts.engine.stats().counters
    names = ("preemptions", "copies", "evictions", "cached_tokens", "finished", "drafted_tokens", "steps_ahead")
    for name in names:
        HAPPENED[name] = HAPPENED.get(name, 0) + getattr(counters, name)


def test_the_loads_are_hard(tiny_models: TinyModels) -> None:
    if HAPPENED.get("finished", 0) < len(SEEDS):
        for seed in SEEDS:
            test_same_bytes_on_triton(seed, tiny_models)
    assert min(HAPPENED.values()) > 0, HAPPENED
