"""Cases of sampling: branches with a seed, tiny temperatures, ids outside the vocabulary, penalties, banned words."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import real
import tiny
from conftest import TinyModels
from engines import Rig, answer, outputs
from octavo.core.events import Delta
from octavo.core.params import SamplingParams
from octavo.decode.branching import Rules
from octavo.engine.build import Parts
from octavo.errors import RequestError
from octavo.sim.executors import script
from octavo.text.badwords import token_sequences

PROMPT = tiny.prompt(24)


def run(parts: Parts, prompt: list[int] = PROMPT, most: int = 16, **given: Any) -> dict[str, Any]:
    request = real.add(parts, prompt, most, **given)
    real.finish(parts)
    return answer(request)


# ---- R18 ------------------------------------------------------------------------------------------------------------


def test_r18_branches_with_a_seed(tiny_models: TinyModels) -> None:
    """R18: with a seed the four texts differ, and are the same four on repeat; greedy gives four equal ones."""
    with real.engine(tiny_models.folder("llama")) as parts:
        first, again = (run(parts, n=4, temperature=1.2, seed=7) for _ in range(2))
        assert first == again
        assert len({tuple(t) for t in first["tokens"]}) == len(set(first["text"])) == 4
        assert [len(t) for t in first["tokens"]] == [16] * 4 and first["ends"] == [("length", None)] * 4
        greedy = run(parts, n=4)
        assert greedy["tokens"] == [greedy["tokens"][0]] * 4
        assert parts.engine.stats().counters.prompt_tokens == 3 * len(PROMPT), "the prompt was counted for each branch"
        other = run(parts, n=4, temperature=1.2, seed=8)
        assert other["tokens"] != first["tokens"]
        assert run(parts, n=2, temperature=1.2, seed=7)["tokens"] == first["tokens"][:2]


def test_r18_branches_that_end_at_different_lengths() -> None:
    """R18: each streamed branch goes on to its own end when another has ended."""

    def ends_by_branch(prefix: Any, draw: Any) -> int:
        return 2 if draw.position - 3 == 2 * draw.branch + 1 else 9

    rig = Rig(choose=ends_by_branch, eos_ids=(2,))
    request = rig.add([1, 1, 1], 8, n=5, temperature=1.0)
    rig.run()
    deltas = [e for e in rig.events[request.id] if isinstance(e, Delta)]
    for branch in range(5):
        own = [e for e in deltas if e.branch == branch]
        assert [t for e in own for t in e.tokens] == outputs(request)[branch]
        assert [e.finish_reason for e in own][:-1] == [None] * (len(own) - 1)
        assert own[-1].finish_reason == ("stop" if branch < 4 else "length")
        assert len(own) == min(8, 2 * branch + 2)


# ---- R25 ------------------------------------------------------------------------------------------------------------


def test_r25_extreme_values_are_greedy_or_harmless(tiny_models: TinyModels) -> None:
    """R25: tiny temperatures and top_p, and top_k of 1, give the greedy answer; nothing else is disturbed."""
    with real.engine(tiny_models.folder("llama")) as parts:
        greedy, plain = run(parts)["tokens"], run(parts, temperature=1.0, seed=5)
        neighbour = real.add(parts, PROMPT, 16, temperature=1.0, seed=5)
        extremes: list[dict[str, Any]] = [
            {"temperature": 0},
            {"temperature": 1e-8},
            {"temperature": 1e-4},
            {"temperature": 1.0, "top_p": 1e-9},
            {"temperature": 1.0, "top_k": 1},
            {"temperature": 100.0, "top_k": 1, "top_p": 1e-9, "min_p": 1.0},
            {"temperature": 1.0, "min_p": 1.0},
            {"temperature": 1e-30, "logit_bias": {3: -1e6}},
        ]
        requests = [real.add(parts, PROMPT, 16, seed=i, **given) for i, given in enumerate(extremes)]
        real.finish(parts)
        assert [outputs(r) for r in requests] == [greedy] * len(extremes)
        assert answer(neighbour) == plain
        for top_k in (0, -1, tiny.VOCAB, tiny.VOCAB + 1, 2**31 - 1):
            assert run(parts, temperature=1.0, seed=5, top_k=top_k) == plain


def test_r25_a_masked_greedy_row_in_a_sampling_batch(tiny_models: TinyModels) -> None:
    """R25: rows with most tokens banned, greedy and not, beside others; if all are banned, that request alone fails."""
    with real.engine(tiny_models.folder("llama"), max_batched_tokens=512) as parts:
        allowed = {7, 9}
        ban = [i for i in range(tiny.VOCAB) if i not in allowed]
        few = [real.add(parts, PROMPT, 8, min_tokens=8, stop_token_ids=ban, temperature=t, seed=1) for t in (0.0, 1.0)]
        none = real.add(parts, PROMPT, 8, min_tokens=8, stop_token_ids=[*ban, 7, 9])
        neighbour = real.add(parts, PROMPT, 8, temperature=0.7, seed=3)
        real.finish(parts)
        assert all(set(outputs(r)[0]) <= allowed and len(outputs(r)[0]) == 8 for r in few)
        assert none.error is not None and none.branches[0].finish_reason == "error"
        assert neighbour.error is None and answer(neighbour) == run(parts, most=8, temperature=0.7, seed=3)


# ---- R26 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [-1, tiny.VOCAB, tiny.VOCAB + 1, 10**12])
def test_r26_ids_outside_the_vocabulary(token: int, tiny_models: TinyModels) -> None:
    """R26: such an id in the prompt, the biases or the stop ids is refused by name; three streams go on unchanged."""
    with real.engine(tiny_models.folder("llama")) as parts:
        want = [run(parts, PROMPT[i:]) for i in range(3)]
        streams = [real.add(parts, PROMPT[i:], 16) for i in range(3)]
        for _ in range(4):
            parts.engine.step()
        for field, prompt, given in (
            ("prompt", [1, token], {}),
            ("logit_bias", [1], {"logit_bias": {token: 5.0}}),
            ("stop_token_ids", [1], {"stop_token_ids": [3, token]}),
        ):
            with pytest.raises(RequestError, match=f"{field}: .*{token}.*vocabulary") as refused:
                real.add(parts, prompt, 4, **given)
            assert refused.value.field == field
            parts.engine.step()
        real.finish(parts)
        assert [answer(s) for s in streams] == want


def test_r26_rows_of_the_head_that_no_token_has(tiny_models: TinyModels) -> None:
    """R26: an embedding larger than the tokenizer: its spare rows are never sampled, though the logits like them."""
    model = tiny.make("llama", vocab_size=tiny.VOCAB + 88)
    folder = model.save(tiny_models.root / "padded")
    with real.engine(folder, max_batched_tokens=512) as parts:
        assert parts.intake.vocab == tiny.VOCAB + 88 and parts.tokenizer.vocab_size == tiny.VOCAB
        request = real.add(parts, PROMPT, 20, n=32, temperature=50.0, seed=1)
        greedy = [real.add(parts, tiny.prompt(20, 50 * i), 20) for i in range(8)]
        real.finish(parts)
        drawn = [t for r in (request, *greedy) for branch in outputs(r) for t in branch]
        assert len(drawn) == 800 and max(drawn) < tiny.VOCAB
        best = [next(iter(e.best)) for r in greedy for e in r.readers[0].logprobs]
        assert max(token for token, _ in best) >= tiny.VOCAB, "the logits never liked a spare row: no test"


# ---- R28 ------------------------------------------------------------------------------------------------------------


class Penalty(LogitsProcessor):
    """Presence and frequency penalties as OpenAI defines them: over the output alone."""

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self.prompt, self.presence, self.frequency = prompt, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self.prompt :], minlength=scores.shape[1]).to(scores.dtype)
        return scores - self.presence * (counts > 0) - self.frequency * counts


def hf(models: TinyModels, prompt: list[int], most: int, processors: Any = (), **given: Any) -> list[int]:
    model = models.get("llama").model
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=most,
            eos_token_id=None,
            pad_token_id=0,
            logits_processor=LogitsProcessorList(processors),
            **given,
        )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


REPEATING = [40, 41, 42, 43] * 6


@pytest.mark.parametrize("prompt", [PROMPT, REPEATING, [5]])
def test_r28_penalties_equal_transformers(prompt: list[int], tiny_models: TinyModels) -> None:
    """R28: repetition counts prompt and output, presence and frequency the output alone."""
    n = len(prompt)
    with real.engine(tiny_models.folder("llama")) as parts:
        plain = hf(tiny_models, prompt, 24)
        assert run(parts, prompt, 24)["tokens"][0] == plain
        for repetition in (1.3, 5.0, 0.7):
            want = hf(tiny_models, prompt, 24, repetition_penalty=repetition)
            assert run(parts, prompt, 24, repetition_penalty=repetition)["tokens"][0] == want
        for presence, frequency in ((2.0, 0.0), (0.0, 1.5), (-1.0, 0.5), (100.0, 0.0)):
            want = hf(tiny_models, prompt, 24, [Penalty(n, presence, frequency)])
            got = run(parts, prompt, 24, presence_penalty=presence, frequency_penalty=frequency)
            assert got["tokens"][0] == want
            assert got["tokens"][0][0] == plain[0], "prompt tokens were punished at the first step"
        assert len(set(run(parts, prompt, 24, presence_penalty=100.0)["tokens"][0])) == 24
        both = hf(tiny_models, prompt, 24, [Penalty(n, 1.0, 0.5)], repetition_penalty=1.3)
        got = run(parts, prompt, 24, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3)
        assert got["tokens"][0] == both
        assert got["logprobs"][0][0] == run(parts, prompt, 1)["logprobs"][0][0], "logprobs are of the raw logits"


def test_r28_logit_bias_under_greedy(tiny_models: TinyModels) -> None:
    """R28: +100 makes a token win, -100 lose, for greedy as for sampling."""
    with real.engine(tiny_models.folder("llama")) as parts:
        plain = run(parts)["tokens"][0]
        assert run(parts, logit_bias={33: 100})["tokens"][0] == [33] * 16
        assert run(parts, logit_bias={33: 100}, temperature=1.0, seed=1)["tokens"][0] == [33] * 16
        without = run(parts, logit_bias={str(plain[0]): -100})["tokens"][0]
        assert plain[0] not in without
        bias = {(plain[0],): -100.0, (plain[1],): 2.0}
        assert run(parts, logit_bias={k[0]: v for k, v in bias.items()})["tokens"][0] == hf(
            tiny_models, PROMPT, 16, sequence_bias=bias
        )


def test_r28_banned_words_in_both_forms(tiny_models: TinyModels) -> None:
    """R28: a word whose spaced form is one token and whose plain form is two is banned in both; so is a phrase."""
    with real.engine(tiny_models.folder("llama")) as parts:
        tokenizer = parts.tokenizer
        encode = tokenizer.encode_inside
        words = ("if", "is", "be", "or", "to", "of", "for", "can", "not", "with", "may", "set", "name", "value", "self")
        word = next(w for w in words if len(encode(" " + w)) == 1 and len(encode(w)) == 2)
        spaced, plain = encode(" " + word), encode(word)
        sequences = token_sequences(tokenizer, [word])
        assert tuple(spaced) in sequences and tuple(plain) in sequences
        bias = {spaced[0]: 60.0, plain[0]: 58.0, plain[1]: 57.0}
        free = run(parts, most=24, logit_bias=bias)
        assert word in free["text"][0]
        held = run(parts, most=24, logit_bias=bias, bad_words=[word])
        assert word not in held["text"][0] and len(held["tokens"][0]) == 24
        assert spaced[0] not in held["tokens"][0]
        pairs = list(zip(held["tokens"][0], held["tokens"][0][1:], strict=False))
        assert tuple(plain) not in pairs
        want = hf(
            tiny_models,
            PROMPT,
            24,
            sequence_bias={(k,): v for k, v in bias.items()},
            bad_words_ids=[list(s) for s in sequences],
        )
        assert held["tokens"][0] == want


def test_r28_the_second_token_of_a_banned_phrase_stays_legal() -> None:
    """R28: of a two-token phrase only the second token right after the first is banned, where both are output."""
    says = script({(1,): [4, 5, 5, 6, 4, 5]}, end=9)
    rig = Rig(choose=says)
    request = rig.add([1], 6)
    request.rules = Rules(bad=((4, 5),))
    rig.run()
    assert outputs(request)[0] == [4, 6, 5, 6, 4, 9]
    rig = Rig(choose=script({(4,): [5, 6]}))
    request = rig.add([4], 2)
    request.rules = Rules(bad=((4, 5),))
    rig.run()
    assert outputs(request)[0] == [5, 6], "a phrase that the prompt began was banned"


def test_nonsense_parameters_name_their_field() -> None:
    """R25: NaN, infinity, negatives, text and booleans are refused with the field's name."""
    for field, values in {
        "temperature": (math.nan, math.inf, -0.1, "1", True, 10**400),
        "top_p": (0, -1, 1.1, math.nan, "x"),
        "min_p": (-0.1, 1.1, math.nan, True),
        "top_k": (-2, 1.5, "3", True, 2**40),
        "repetition_penalty": (0, -1, math.nan, math.inf),
        "n": (0, -1, 10**6, 1.0, True, "2"),
        "seed": (1.5, "a", 2**70, True),
    }.items():
        for value in values:
            with pytest.raises(ValueError, match=f"^{field}: ") as refused:
                SamplingParams(**{field: value})
            assert refused.value.field == field  # type: ignore[attr-defined]
