"""What a request may ask of generation, validated field by field."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from octavo.core.guide import Guide
from octavo.errors import RequestError

MAX_BRANCHES = 1024
MAX_LOGPROBS = 1000
MAX_STOPS = 64
MAX_BIASES = 4096


class ParamError(RequestError):
    """A field of :class:`SamplingParams` is out of its range; ``field`` names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}", field)


def _number(field: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ParamError(field, f"must be a number, not {type(value).__name__}")
    try:
        value = float(value)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise ParamError(field, f"must be a finite number, got {value}")
    if value < low or value > high or (open_low and value == low):
        raise ParamError(field, f"must be in {'(' if open_low else '['}{low:g}, {high:g}], got {value:g}")
    return float(value)


def _integer(field: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        # NumPy integers count as integers; floats, strings and booleans do not
        if isinstance(value, (bool, float, str)) or not hasattr(value, "__index__"):
            raise ParamError(field, f"must be an integer, not {type(value).__name__}")
        value = value.__index__()
    if not low <= value <= high:
        raise ParamError(field, f"must be in [{low}, {high}], got {value}")
    return int(value)


def _token(field: str, value: Any) -> int:
    """A token id; a text of digits counts, for the keys of JSON objects are texts."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value):
        value = int(value)
    return _integer(field, value, -(2**62), 2**62)


def _flag(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ParamError(field, f"must be true or false, not {type(value).__name__}")
    return value


def _strings(field: str, value: Any, most: int) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, Sequence) or any(not isinstance(s, str) for s in items):
        raise ParamError(field, "must be a string or a list of strings")
    if any(not s for s in items):
        raise ParamError(field, "must not hold an empty string")
    if len(items) > most:
        raise ParamError(field, f"holds {len(items)} entries, at most {most} are allowed")
    return tuple(items)


# field -> (lowest, highest, lowest itself excluded)
_RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, 100.0, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "repetition_penalty": (0.0, 100.0, True),
    "presence_penalty": (-100.0, 100.0, False),
    "frequency_penalty": (-100.0, 100.0, False),
}
_NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a request ends.

    ``None`` for temperature, top_k, top_p, min_p and repetition_penalty means "not given": the model's generation
    config fills it, or the neutral value (1, 0, 1, 0, 1).  Raises :class:`ParamError` (a ValueError that names the
    field) on anything out of range.

    - ``n``: branches that share the prompt's blocks; ``best_of``: how many are computed, the ``n`` of them with the
      largest sum of log-probabilities are returned
    - ``temperature``: 0 is greedy; ``top_k``: 0 or -1 is all; ``top_p``, ``min_p``: shares of probability
    - ``repetition_penalty``: over prompt and output (CTRL); ``presence_penalty``, ``frequency_penalty``: over output
    - ``seed``: the draw is a function of (seed, branch, position); drawn and reported when not given
    - ``logit_bias``: token id -> value added to its logit; ``bad_words``: strings that may not appear
    - ``stop``, ``stop_token_ids``: what ends the output besides the model's end tokens; the stop string is cut off
      unless ``include_stop_str_in_output``
    - ``min_tokens``: no end before; ``max_tokens``: None is whatever fits; ``ignore_eos``: run past end tokens
    - ``guide``: what the output must look like (:class:`octavo.Guide`).  It ends once the guide is fulfilled and the
      model wants no more, or nothing more is allowed: ``min_tokens`` and ``ignore_eos`` hold back the first of these,
      never the second.  A token that ``bad_words`` or a stop bans may be the only one that the guide allows; then the
      request ends with an error
    - ``logprobs``, ``prompt_logprobs``: how many best tokens' log-probabilities to report at each position
    """

    n: int = 1
    best_of: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] = ()
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    guide: Guide | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)  # frozen for everybody else

        put("n", _integer("n", self.n, 1, MAX_BRANCHES))
        if self.best_of is not None:
            put("best_of", _integer("best_of", self.best_of, 1, MAX_BRANCHES))
            if self.best_of < self.n:
                raise ParamError("best_of", f"is {self.best_of}, less than n, {self.n}")
        for name, (low, high, open_low) in _RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in _NEUTRAL:
                put(name, _number(name, 0.0 if value is None else value, low, high, open_low=open_low))
        if self.top_k is not None:
            put("top_k", max(0, _integer("top_k", self.top_k, -1, 2**31 - 1)))
        if self.seed is not None:
            put("seed", _integer("seed", self.seed, -(2**63), 2**64 - 1) % 2**64)
        put("logit_bias", self._checked_bias())
        put("bad_words", _strings("bad_words", () if self.bad_words is None else self.bad_words, 1000))
        put("stop", _strings("stop", () if self.stop is None else self.stop, MAX_STOPS))
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
            raise ParamError("stop_token_ids", "must be a list of token ids")
        put("stop_token_ids", tuple(_integer("stop_token_ids", i, -(2**62), 2**62) for i in ids))
        put("min_tokens", _integer("min_tokens", self.min_tokens, 0, 2**31 - 1))
        if self.max_tokens is not None:
            put("max_tokens", _integer("max_tokens", self.max_tokens, 0, 2**31 - 1))
            if self.max_tokens == 0 and self.prompt_logprobs is None:
                raise ParamError("max_tokens", "must be at least 1 (0 is for scoring, together with prompt_logprobs)")
            if self.min_tokens > self.max_tokens:
                raise ParamError("min_tokens", f"is {self.min_tokens}, more than max_tokens, {self.max_tokens}")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            put(name, _flag(name, getattr(self, name)))
        if self.guide is not None and not isinstance(self.guide, Guide):
            raise ParamError("guide", f"must be a Guide, such as Guide.json(schema), not {type(self.guide).__name__}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                put(name, _integer(name, getattr(self, name), 0, MAX_LOGPROBS))

    def _checked_bias(self) -> dict[int, float] | None:
        if self.logit_bias is None:
            return None
        if not isinstance(self.logit_bias, Mapping):
            raise ParamError("logit_bias", "must map token ids to numbers")
        if len(self.logit_bias) > MAX_BIASES:
            raise ParamError("logit_bias", f"holds {len(self.logit_bias)} entries, at most {MAX_BIASES} are allowed")
        return {_token("logit_bias", k): _number("logit_bias", v, -1e6, 1e6) for k, v in self.logit_bias.items()}

    def filled(self, defaults: Mapping[str, Any], seed: int) -> SamplingParams:
        """A copy in which every field that was not given has a value, from ``defaults`` or the neutral one."""
        given = {name: getattr(self, name) for name in _NEUTRAL}
        values = {k: v if v is not None else defaults.get(k, _NEUTRAL[k]) for k, v in given.items()}
        return replace(self, **values, seed=self.seed if self.seed is not None else seed)

    @cached_property
    def constants(self) -> tuple[float, int, float, float, float, float, float, int, int]:
        """What every draw of the request takes from here: the fields of ``Draw`` from temperature to logprobs."""
        temperature, top_k, top_p, min_p = self.temperature, self.top_k, self.top_p, self.min_p
        repetition, seed = self.repetition_penalty, self.seed
        if temperature is None or top_k is None or top_p is None or min_p is None or repetition is None or seed is None:
            raise ValueError("parameters must be filled before anything is drawn")
        logprobs = self.scored
        penalties = self.presence_penalty, self.frequency_penalty
        return temperature, top_k, top_p, min_p, repetition, *penalties, seed, logprobs

    @property
    def branches(self) -> int:
        """How many answers are computed."""
        return self.best_of or self.n

    @property
    def scored(self) -> int:
        """How many best log-probabilities each draw reports; -1: none.  Choosing the best needs the drawn one's."""
        if self.logprobs is not None:
            return self.logprobs
        return 0 if self.branches > self.n else -1

    @cached_property
    def penalised(self) -> bool:
        """Whether the choice of a token needs the tokens before it."""
        return self.repetition_penalty not in (None, 1.0) or self.presence_penalty != 0 or self.frequency_penalty != 0

    def __repr__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) not in (f.default, ())}
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in values.items())})"
