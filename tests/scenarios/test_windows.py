"""Models whose layers see a window only: blocks that slide out are freed and reused, prefixes are still cached."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import oracle
import real
import tiny
from conftest import TinyModels
from engines import Rig, alone, answer, ids, outputs

LENGTHS = (5, 15, 16, 17, 40)


def hf_greedy(models: TinyModels, family: str, prompt: list[int], most: int) -> list[int]:
    model = models.get(family).model
    with torch.no_grad():
        ids = torch.tensor([prompt])
        given = {"do_sample": False, "max_new_tokens": most, "eos_token_id": None, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **given)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@pytest.mark.parametrize("shared", [0, 9])
def test_r33_windows_equal_transformers(family: str, shared: int, tiny_models: TinyModels) -> None:
    """R33: window 16, B=4, prompts around the window, 40 tokens, cold and with a shared prefix, in recycled blocks."""
    tail = 700
    truths = {}
    for length in LENGTHS:
        prompt = tiny.prompt(shared) + tiny.prompt(length, tail)
        tokens = hf_greedy(tiny_models, family, prompt, 40)
        exact = oracle.log_softmax(oracle.logits(tiny_models.get(family).model, prompt + tokens))
        truths[length] = tokens, exact[np.arange(len(prompt) - 1, len(prompt) + 39), tokens]
    with real.engine(
        tiny_models.folder(family), block_size=4, kv_blocks=22 * (6 if family == "gemma3" else 1), compute="exact"
    ) as parts:
        for _ in range(2):
            for length in LENGTHS:
                prompt = tiny.prompt(shared) + tiny.prompt(length, tail)
                request = real.add(parts, prompt, min(40, parts.intake.longest - len(prompt)))
                beside = real.add(parts, tiny.prompt(10, 50 * length), 6)
                real.finish(parts)
                count = len(outputs(request)[0])
                assert count >= 40 - shared // 2 and beside.error is None
                want, logprobs = truths[length]
                assert outputs(request)[0] == want[:count]
                got = np.array([entry.logprob for entry in request.readers[0].logprobs])
                assert np.abs(got - logprobs[:count]).max() < 5e-4
        counters = parts.engine.stats().counters
        assert counters.cached_tokens > 0 and counters.evictions > 0


def test_r33_hits_of_windowed_models_change_nothing(tiny_models: TinyModels) -> None:
    """R33: what a windowed model takes from the cache is bit for bit what it would compute."""
    for family in ("mistral", "gemma3"):
        answers: dict[bool, list[dict[str, object]]] = {True: [], False: []}
        for cache in (True, False):
            with real.engine(tiny_models.folder(family), block_size=4, kv_blocks=900, prefix_cache=cache) as parts:
                for length in (16, 17, 40, 41, 63, 64):
                    request = real.add(parts, tiny.prompt(length), 20, prompt_logprobs=None)
                    real.finish(parts)
                    answers[cache].append(answer(request))
                    if cache and length > 17:
                        assert request.cached >= 16, f"{family}: {length} tokens hit {request.cached}"
        assert answers[True] == answers[False]


def test_a_windowed_sequence_holds_what_its_window_reaches() -> None:
    """A long answer in a pool that holds the window: blocks that slid out are reused while it runs."""
    rig = Rig(pool=6, block_size=4, windows=(8,), context=2000)
    request = rig.add(ids(30), 200)
    rig.run()
    assert outputs(request) == alone(ids(30), 200, windows=(8,))
    assert rig.engine.stats().blocks_peak <= 6


def test_a_hit_past_own_blocks_frees_what_the_window_has_passed() -> None:
    """A running prompt that hits the next block must not keep more than its window reaches.

    Pool 3, B=4, window 8: the first prompt leaves only its third and fourth block in the cache.  The second one has no
    hit at first, computes two blocks, and then finds the third: with all three held it could take no fourth.
    """
    rig = Rig(pool=3, block_size=4, windows=(8,), budget=4, context=500)
    prompt = ids(17, 1)
    rig.add(prompt, 1)
    rig.run()
    request = rig.add(prompt[:16], 4)
    rig.run()
    assert request.cached == 4
    assert outputs(request) == alone(prompt[:16], 4, windows=(8,))
