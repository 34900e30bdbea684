"""A context of 100,000 tokens, on two layers of random weights."""

from __future__ import annotations

from pathlib import Path

import tiny
from octavo import LLM, SamplingParams

LENGTH = 100_000
ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1}


def test_a_hundred_thousand_tokens(tmp_path: Path) -> None:
    """Computed, answered, and found again in the cache; in steps of other lengths the same bytes."""
    path = tiny.make("llama", max_position_embeddings=LENGTH + 64, **ONE_HEAD).save(tmp_path / "long")
    prompt = [1 + i * i % 250 for i in range(LENGTH)]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3)
    told = []
    for budget in (4096, 1500):
        with LLM(str(path), kv_memory="1GiB", threads=1, max_batched_tokens=budget, max_context=LENGTH + 64) as llm:
            (cold,) = llm.generate([prompt], params)
            (again,) = llm.generate([prompt], params)
            assert again.num_cached_tokens == (LENGTH - 1) // 16 * 16
            stats = llm.stats()
            assert stats.blocks_used == 0 and stats.blocks_cached * stats.block_size >= LENGTH - stats.block_size
        assert cold.outputs[0].token_ids == again.outputs[0].token_ids
        assert cold.outputs[0].logprobs == again.outputs[0].logprobs
        told.append((cold.outputs[0].token_ids, cold.outputs[0].logprobs))
    assert told[0] == told[1] and len(told[0][0]) == 6
