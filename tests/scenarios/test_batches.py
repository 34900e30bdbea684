"""Cases of batching: long prompts beside streams, and answers that must not depend on the batch."""

from __future__ import annotations

import random
from typing import Any

import pytest

import real
import tiny
from conftest import TinyModels
from engines import Rig, alone, answer, ids, outputs, solo


@pytest.mark.parametrize("chunk", [16, 64, 256])
def test_r66_a_long_prompt_stalls_nobody(chunk: int) -> None:
    """R66: while 4,000 tokens are read, a stream gets a token in every step: its longest gap is one step of a chunk."""
    rig = Rig(pool=300, block_size=16, budget=chunk, context=5000, audited=False, blind=True)
    stream = rig.add(ids(10), 900)
    rig.steps(3)
    long = rig.add(ids(4000, 1), 1)
    gaps, steps = [], 0
    while not long.finished:
        before = len(outputs(stream)[0])
        assert rig.step() <= chunk, "a step is longer than its chunk"
        gaps.append(len(outputs(stream)[0]) - before)
        steps += 1
    assert gaps == [1] * steps, "the stream missed a step"
    assert steps == -(-4000 // (chunk - 1)), "the prompt was not read as fast as the budget allows"


def test_r66_every_chunk_gives_the_same_answer() -> None:
    """R66: chunks of 1, 7, B, B+1 tokens and whole (on the kernels: tests/property/test_same_bytes_kernels.py)."""
    want = answer(solo(ids(300, 1), 12, logprobs=2, prompt_logprobs=1))
    for chunk in (1, 7, 16, 17, 5000):
        rig = Rig(pool=64, block_size=16, budget=chunk, audited=False)
        stream = rig.add(ids(10), 30)
        request = rig.add(ids(300, 1), 12, logprobs=2, prompt_logprobs=1)
        rig.run()
        assert answer(request) == want and outputs(stream) == alone(ids(10), 30)


@pytest.mark.parametrize(("family", "type"), [("llama", "F32"), ("qwen2", "Q4_0"), ("gemma3", "Q8_0")])
@pytest.mark.parametrize("threads", [1, 2])
def test_r67_the_batch_changes_no_bit(family: str, type: str, threads: int, tiny_models: TinyModels) -> None:
    """R67: alone, in batches of 2, 8, 44, shuffled, with long and short neighbours, five times: the same logprobs."""
    rng = random.Random(67)
    prompt = tiny.prompt(37, 300)
    model: Any = tiny_models.folder(family) if type == "F32" else tiny_models.gguf(family, type)
    with real.engine(model, threads=1, kv_dtype="float16") as parts:
        request = real.add(parts, prompt, 10, logprobs=5, prompt_logprobs=1)
        real.finish(parts)
        want = answer(request)
    settings = {"kv_blocks": 2500, "threads": threads, "max_batched_tokens": 400, "kv_dtype": "float16"}
    with real.engine(model, audit=False, **settings) as parts:
        for _ in range(5):
            for size in (1, 2, 8, 44):
                others = [tiny.prompt(rng.choice([1, 5, 60, 200]), rng.randrange(3000)) for _ in range(size - 1)]
                order = [prompt, *others]
                rng.shuffle(order)
                batch = [real.add(parts, p, 10, logprobs=5, prompt_logprobs=1 if p is prompt else None) for p in order]
                real.finish(parts)
                assert answer(batch[order.index(prompt)]) == want, f"in a batch of {size}"
