"""Beam search against transformers: the same sequences, the same scores.  Cases R30, R31."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from octavo import LLM, SamplingParams
from octavo.engine.outputs import request_output
from octavo.paging.audit import audit_idle


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    made = tiny.make("llama", "F32")
    return made.model, made.save(tmp_path_factory.mktemp("beam"))


def theirs(model: Any, prompt: list[int], width: int, **given: Any) -> list[tuple[list[int], float]]:
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            pad_token_id=0,
            **given,
        )
    found = []
    for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        ends = given.get("eos_token_id") or []
        cut = next((i + 1 for i, t in enumerate(tokens) if t in ends), len(tokens))
        found.append((tokens[:cut], score))
    return found


@pytest.mark.parametrize("width", [2, 4, 8])  # transformers takes 1 as greedy search: test_width_one_is_greedy
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("early", [False, True, "never"])
def test_sequences_and_scores(world: tuple[Any, Path], width: int, penalty: float, early: bool | str) -> None:
    model, folder = world
    with LLM(str(folder), compute="exact", kv_dtype="float32", kv_blocks=400, block_size=4, audit=True) as llm:
        for seed, length in enumerate((7, 8, 9, 33)):
            prompt = tiny.prompt(length, seed)
            # Ends that come early: the tokens that greedy search takes at steps 2 and 4 of this prompt
            greedy = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
            for ends in ((), tuple(dict.fromkeys(greedy[0].outputs[0].token_ids[2:5:2]))):
                intake = llm.parts.intake
                intake.eos_ids = ends
                want = theirs(
                    model,
                    prompt,
                    width,
                    max_new_tokens=12,
                    length_penalty=penalty,
                    early_stopping=early,
                    eos_token_id=list(ends) or None,
                )
                got = llm.beam_search(prompt, width, 12, penalty, early)[0]
                assert [o.token_ids for o in got.outputs] == [t for t, _ in want]
                for output, (_, score) in zip(got.outputs, want, strict=True):
                    # float32 sums, which a length penalty of -1 multiplies by the length
                    assert output.score == pytest.approx(score, abs=1e-4, rel=2e-6)
        audit_idle(llm.parts.engine.kv)


def test_width_one_is_greedy(world: tuple[Any, Path]) -> None:
    """R31."""
    with LLM(str(world[1]), compute="exact", kv_dtype="float32", kv_blocks=100, block_size=4) as llm:
        prompt = tiny.prompt(20, 3)
        beam = llm.beam_search(prompt, 1, 16, ignore_eos=True)[0].outputs[0]
        greedy = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))[0].outputs[0]
        assert beam.token_ids == greedy.token_ids


@pytest.mark.parametrize("seed", range(4))
def test_same_beams_after_preemption(world: tuple[Any, Path], seed: int) -> None:
    """Beams that are preempted and come back are the same beams: equal tokens and equal scores, bit for bit."""
    prompts = [tiny.prompt(n, n) for n in (7, 8, 9, 12)]
    with LLM(str(world[1]), kv_blocks=400, block_size=4) as llm:
        alone = [llm.beam_search(p, 4, 10, ignore_eos=True)[0].outputs for p in prompts]
    rng = random.Random(seed)
    with LLM(str(world[1]), kv_blocks=30, block_size=4, audit=True, max_batched_tokens=8) as llm:
        engine, intake = llm.parts.engine, llm.parts.intake
        requests = [intake.beam_search(p, width=4, max_tokens=10, ignore_eos=True) for p in prompts]
        for request in requests:
            engine.add(request)
        while engine.busy:
            engine.step()
            if engine.scheduler.running and rng.random() < 0.4:
                engine.scheduler.preempt(rng.choice(engine.scheduler.running))
        assert engine.scheduler.preemptions > 0
        audit_idle(engine.kv)
        assert [request_output(r, engine.tokenizer.decode).outputs for r in requests] == alone
