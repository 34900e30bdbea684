"""Intake: what a request may be, and the one clear error for what it may not."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from engines import Pieces
from octavo.core.params import SamplingParams
from octavo.engine.intake import Intake
from octavo.errors import RequestError


class Words(Pieces):
    """One token a letter, from "a" on."""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return [*([1] if add_special and self.bos_id is not None else []), *(ord(c) - ord("a") for c in text)]

    def encode_inside(self, text: str) -> list[int]:
        return self.encode(text.replace(" ", "z"), add_special=False)


def intake(**given: Any) -> Intake:
    settings: dict[str, Any] = {"tokenizer": Words([b"x"] * 26), "vocab": 26, "context": 64, "longest": 40}
    return Intake(**{**settings, "now": lambda: 3.5, **given})


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("abc", [0, 1, 2]),
        ([0, 1, 2], [0, 1, 2]),
        ((5,), [5]),
        (array("i", [4, 5]), [4, 5]),
        (array("q", [4, 5]), [4, 5]),
        (np.array([7, 8]), [7, 8]),
        (np.array([7], dtype=np.uint8), [7]),
        ([np.int64(3), 4], [3, 4]),
        (range(3), [0, 1, 2]),
        ({"prompt": "ab"}, [0, 1]),
        ({"prompt_token_ids": [9]}, [9]),
    ],
)
def test_prompts(prompt: Any, tokens: list[int]) -> None:
    request = intake().request(prompt)
    assert list(request.prompt) == tokens and request.arrival == 3.5
    text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
    assert request.prompt_text == (text if isinstance(text, str) else None)


@pytest.mark.parametrize(
    "prompt",
    [
        "", [], (), array("i"), np.array([], dtype=int), None, 5, 5.0, True, b"ab", bytearray(b"ab"), np.int64(3), {},
        {1}, {"prompt": None}, {"prompt": ""}, {"text": "a"}, [1, 1.0], [1, "2"], [True], [None], [[1]],
        np.array([[1]]), np.array([1.5]), np.array(3), object(), [-1], [26], [10**12], [2**31], [-(2**40)],
    ],
    ids=lambda p: repr(p)[:20],
)  # fmt: skip
def test_bad_prompts(prompt: Any) -> None:
    with pytest.raises(RequestError, match="prompt") as refused:
        intake().request(prompt)
    assert refused.value.field == "prompt"


@pytest.mark.parametrize("token", [-1, 26, 27, 10**12])
@pytest.mark.parametrize("field", ["prompt", "logit_bias", "stop_token_ids"])
def test_ids_outside_the_vocabulary(field: str, token: int) -> None:
    given: dict[str, Any] = {
        "logit_bias": {"logit_bias": {token: 1.0}},
        "stop_token_ids": {"stop_token_ids": [token]},
    }.get(field, {})
    with pytest.raises(RequestError, match=f"{field}: token id {token} is outside the vocabulary") as refused:
        intake().request([token] if field == "prompt" else [1], SamplingParams(**given))
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("length", "most", "field", "message"),
    [
        (30, 11, "max_tokens", r"30 prompt tokens \+ max_tokens 11 = 41 tokens exceed the 40 tokens that the whole KV"),
        (40, 1, "prompt", r"40 prompt tokens \+ max_tokens 1 = 41 tokens exceed the 40 tokens"),
        (40, None, "prompt", "40 prompt tokens = 41 tokens exceed the 40 tokens"),
        (70, None, "prompt", "70 prompt tokens = 71 tokens exceed the context of 64 tokens"),
        (30, 35, "max_tokens", "= 65 tokens exceed the context of 64"),
        (1, 2**31 - 1, "max_tokens", "= 2147483648 tokens exceed the context of 64"),
    ],
)
def test_what_can_never_fit(length: int, most: int | None, field: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        intake().request([1] * length, SamplingParams(max_tokens=most))
    assert (refused.value.field, refused.value.code) == (field, "context_length_exceeded")


def test_the_limit_of_a_request() -> None:
    assert intake().request([1] * 30, SamplingParams(max_tokens=10)).limit == 40
    assert intake().request([1] * 30).limit == 40, "without max_tokens it runs up to what fits"
    assert intake(longest=400).request([1] * 30).limit == 64
    assert intake().request([1] * 40, SamplingParams(max_tokens=0, prompt_logprobs=1)).limit == 40


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("priority", {"priority": "1"}),
        ("priority", {"priority": True}),
        ("priority", {"priority": 1.0}),
        ("user", {"user": 5}),
        ("cache_salt", {"cache_salt": 5}),
        ("cache_salt", {"cache_salt": 0}),
        ("params", {"params": {"n": 1}}),
    ],
)
def test_other_fields(field: str, given: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=field) as refused:
        intake().request([1], **given)
    assert refused.value.field == field


def test_numbers_ids_and_seeds() -> None:
    door = intake()
    first, second = door.request([1]), door.request([1], id="mine", params=SamplingParams(seed=4))
    assert (first.id, first.number, second.id, second.number) == ("req-1", 1, "mine", 2)
    assert second.params.seed == 4 and first.params.seed is not None
    assert first.params.seed != door.request([1]).params.seed
    with pytest.raises(RequestError):
        door.request([])
    assert door.request([1]).number == 4, "a refused request has no number"


def test_end_tokens_and_bad_words() -> None:
    door = intake(eos_ids=(3, 4))
    assert door.request([1]).rules.ends == (3, 4)
    assert door.request([1], SamplingParams(stop_token_ids=[7])).rules.ends == (3, 4, 7)
    assert door.request([1], SamplingParams(stop_token_ids=[7], ignore_eos=True)).rules.ends == (7,)
    rules = door.request([1], SamplingParams(bad_words=["ab"])).rules
    assert set(rules.bad) == {(0, 1), (25, 0, 1)}
    with pytest.raises(RequestError, match="bad_words"):
        door.request([1], SamplingParams(bad_words=["  "]))
    with pytest.raises(RequestError, match="bad_words: this engine has no tokenizer"):
        intake(tokenizer=None).request([1], SamplingParams(bad_words=["a"]))
    with pytest.raises(RequestError, match="no tokenizer, pass token ids"):
        intake(tokenizer=None).request("a")


def test_many_word_lists_are_not_kept_for_ever() -> None:
    door = intake()
    for i in range(600):
        door.request([1], SamplingParams(bad_words=["a" * (1 + i)]))
    assert len(door._bad) <= 256
