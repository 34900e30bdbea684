"""Every field of SamplingParams: what it takes, what it refuses and by which name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from octavo import SamplingParams
from octavo.core.params import MAX_BIASES, MAX_BRANCHES, MAX_LOGPROBS, MAX_STOPS, ParamError
from octavo.errors import RequestError

NUMBERS: tuple[Any, ...] = (math.nan, math.inf, -math.inf, 10**400, "1", True, [1], {}, b"1")
INTEGERS: tuple[Any, ...] = (1.0, 1.5, "1", True, [1], math.nan, 2**70)
FLAGS: tuple[Any, ...] = (1, 0, "true", None, [])

REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (*INTEGERS, 0, -1, MAX_BRANCHES + 1, None),
    "temperature": (*NUMBERS, -0.01, 100.1),
    "top_k": (*INTEGERS, -2),
    "top_p": (*NUMBERS, 0, -0.1, 1.01),
    "min_p": (*NUMBERS, -0.1, 1.01),
    "repetition_penalty": (*NUMBERS, 0, -1, 101),
    "presence_penalty": (*NUMBERS, -101, 101),
    "frequency_penalty": (*NUMBERS, -101, 101),
    "seed": (*INTEGERS, 2**64, -(2**63) - 1),
    "logit_bias": (
        [1], "1", 5, {1: "a"}, {1: math.nan}, {1: math.inf}, {1: None}, {1: True}, {"a": 1}, {"²": 1}, {"": 1},
        {1.5: 1}, {True: 1}, {None: 1}, {"9" * 5000: 1}, dict.fromkeys(range(MAX_BIASES + 1), 1.0),
    ),
    "bad_words": ("", [""], ["a", ""], [1], 5, 0, b"a", {"a"}, ["a"] * 1001),
    "stop": ("", [""], ["a", ""], [1], 5, 0, False, b"a", {"a"}, ["a"] * (MAX_STOPS + 1)),
    "stop_token_ids": ("1", b"1", 5, 0, [1.5], ["1"], [True], {1}, [2**70], [None]),
    "min_tokens": (*INTEGERS, -1, None),
    "max_tokens": (*INTEGERS, -1, 0),
    "ignore_eos": FLAGS,
    "skip_special_tokens": FLAGS,
    "include_stop_str_in_output": FLAGS,
    "logprobs": (*INTEGERS, -1, MAX_LOGPROBS + 1),
    "prompt_logprobs": (*INTEGERS, -1, MAX_LOGPROBS + 1),
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"), [(f, v) for f, values in REFUSED.items() for v in values], ids=lambda v: repr(v)[:24]
)
def test_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ParamError) as refused:
        SamplingParams(**{field: value})
    assert refused.value.field == field and str(refused.value).startswith(f"{field}: ")
    assert isinstance(refused.value, RequestError) and isinstance(refused.value, ValueError)


@pytest.mark.parametrize(
    ("field", "given", "kept"),
    [
        ("n", np.int64(3), 3),
        ("temperature", 0, 0.0),
        ("temperature", 1, 1.0),
        ("presence_penalty", None, 0.0),
        ("frequency_penalty", 1, 1.0),
        ("top_p", None, None),
        ("top_k", -1, 0),
        ("top_k", np.int32(7), 7),
        ("seed", -1, 2**64 - 1),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("logit_bias", {"12": 1, 3: -2.5}, {12: 1.0, 3: -2.5}),
        ("logit_bias", {}, {}),
        ("logit_bias", None, None),
        ("stop", "end", ("end",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", None, ()),
        ("stop", [], ()),
        ("bad_words", None, ()),
        ("bad_words", "word", ("word",)),
        ("stop_token_ids", None, ()),
        ("stop_token_ids", (np.int32(3), 4), (3, 4)),
        ("max_tokens", None, None),
        ("logprobs", 0, 0),
    ],
)
def test_taken(field: str, given: Any, kept: Any) -> None:
    value = getattr(SamplingParams(**{field: given}), field)
    assert value == kept and type(value) is type(kept)


def test_min_and_max_tokens() -> None:
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=500).max_tokens is None
    with pytest.raises(ParamError, match="^min_tokens: is 6, more than max_tokens, 5"):
        SamplingParams(min_tokens=6, max_tokens=5)
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0


def test_what_is_not_given_is_filled() -> None:
    """The request's own value, else the model's default, else the neutral one."""
    defaults = {"temperature": 0.3, "top_k": 20, "top_p": 0.9}
    filled = SamplingParams(top_k=0, temperature=0).filled(defaults, seed=77)
    assert (filled.temperature, filled.top_k, filled.top_p) == (0.0, 0, 0.9)
    assert (filled.min_p, filled.repetition_penalty, filled.seed) == (0.0, 1.0, 77)
    neutral = SamplingParams(seed=5).filled({}, seed=77)
    assert (neutral.temperature, neutral.top_k, neutral.top_p, neutral.seed) == (1.0, 0, 1.0, 5)


@pytest.mark.parametrize(
    ("given", "penalised"),
    [
        ({}, False),
        ({"repetition_penalty": 1.0}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
    ],
)
def test_which_choices_need_the_tokens_before(given: dict[str, Any], penalised: bool) -> None:
    assert SamplingParams(**given).penalised is penalised


def test_frozen_and_short_in_print() -> None:
    params = SamplingParams(temperature=0.5, stop="x")
    with pytest.raises(AttributeError):
        params.temperature = 1.0  # type: ignore[misc]
    assert repr(params) == "SamplingParams(temperature=0.5, stop=('x',))"
    assert repr(SamplingParams()) == "SamplingParams()"
