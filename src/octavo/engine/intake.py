"""From what a user passes to a request that is sure to fit, or one clear error."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from octavo.core.params import SamplingParams
from octavo.core.request import Request, Sink
from octavo.decode.beam import BeamSearch
from octavo.decode.branching import Rules
from octavo.engine.beams import Beams
from octavo.errors import RequestError
from octavo.text.badwords import token_sequences
from octavo.text.tokenizer import Tokenizer

RESERVED = ("messages", "tools", "conversation")


def checked_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Keyword arguments for a chat template.  Raises RequestError unless they are named, and names of its own."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise RequestError("chat_template_kwargs must be a mapping of names to values", "chat_template_kwargs")
    for name in options:
        if not isinstance(name, str) or name in RESERVED:
            raise RequestError(f"chat_template_kwargs: {name!r} cannot be set here", "chat_template_kwargs")
    return dict(options)


MAX_WIDTH = 256


def salted(cache_salt: str | None) -> bytes:
    """A salt as the prefix cache takes it; none at all is another thing than an empty one."""
    return b"" if cache_salt is None else b"user:" + cache_salt.encode("utf-8", "surrogatepass")


def _within(field: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{field} must be an integer in [{low}, {high}], not {value!r}", field)


Prompt = str | Sequence[int] | Mapping[str, Any]


class Intake:
    """Owns: the limits of an engine and the numbering of requests.

    Promises: what it lets through can run alone in the pool to its end; what can't is refused here, with both numbers.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer | None,
        vocab: int,
        context: int,
        longest: int,
        eos_ids: tuple[int, ...] = (),
        defaults: Mapping[str, Any] | None = None,
        now: Callable[[], float],
        blocks: int = 2**31,
        beam_blocks: Callable[[int, int, int], int] = lambda prompt, output, width: 0,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab = vocab
        self.context = context
        self.longest = longest
        self.eos_ids = eos_ids
        self.defaults = dict(defaults or {})
        self._now = now
        self.blocks = blocks
        self.beam_blocks = beam_blocks
        self._numbers = count(1)  # one for all threads that make requests
        self._bad: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {}

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
        priority: int = 0,
        user: str = "",
        cache_salt: str | None = None,
        sink: Sink | None = None,
        add_special: bool = True,
    ) -> Request:
        """Check and number a request.  Raises RequestError naming the field."""
        params = params or SamplingParams()
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, not {type(params).__name__}", "params")
        params = params.filled(self.defaults, secrets.randbits(63))
        text, tokens = self._tokens(prompt, add_special)
        self._check_ids("prompt", tokens)
        self._check_ids("logit_bias", params.logit_bias or ())
        self._check_ids("stop_token_ids", params.stop_token_ids)
        limit = self._limit(len(tokens), params.max_tokens)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"priority must be an integer, not {priority!r}", "priority")
        for field, value in (("user", user), ("cache_salt", "" if cache_salt is None else cache_salt)):
            if not isinstance(value, str):
                raise RequestError(f"{field} must be a text, not {value!r}", field)
        number = next(self._numbers)
        return Request(
            id if id is not None else f"req-{number}",
            number,
            tokens,
            params,
            self._rules(params),
            limit,
            prompt_text=text,
            priority=priority,
            user=user,
            salt=salted(cache_salt),
            arrival=self._now(),
            sink=sink,
        )

    def beam_search(
        self,
        prompt: Prompt,
        *,
        width: int = 4,
        max_tokens: int = 64,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
        ignore_eos: bool = False,
        **given: Any,
    ) -> Request:
        """A request that is answered by beam search; all of its beams have to fit at a time."""
        _within("width", width, 1, MAX_WIDTH)
        if isinstance(length_penalty, bool) or not isinstance(length_penalty, (int, float)):
            raise RequestError(f"length_penalty must be a number, not {length_penalty!r}", "length_penalty")
        if not -100 <= length_penalty <= 100:
            raise RequestError(f"length_penalty must be in [-100, 100], not {length_penalty}", "length_penalty")
        if early_stopping not in (True, False, "never"):
            message = f'early_stopping must be true, false or "never", not {early_stopping!r}'
            raise RequestError(message, "early_stopping")
        _within("max_tokens", max_tokens, 1, 2**31 - 1)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos)
        request = self.request(prompt, params, **given)
        ends = () if ignore_eos else self.eos_ids
        search = BeamSearch(width, max_tokens, ends, float(length_penalty), early_stopping)
        if search.kept > self.vocab:
            raise RequestError(f"width {width} is too large for a vocabulary of {self.vocab}", "width")
        needed = self.beam_blocks(len(request.prompt), max_tokens, width)
        if needed > self.blocks:
            raise RequestError(
                f"width: {width} beams of {len(request.prompt)} + {max_tokens} tokens can need {needed} blocks, "
                f"the whole KV cache has {self.blocks}",
                "width",
            )
        request.beams = Beams(search)
        return request

    def tokens(self, prompt: Prompt, add_special: bool = True) -> array[int]:
        """Checked token ids of a text or of ids.  Raises RequestError."""
        _, tokens = self._tokens(prompt, add_special)
        self._check_ids("prompt", tokens)
        return tokens

    def _tokens(self, prompt: Prompt, add_special: bool) -> tuple[str | None, array[int]]:
        if isinstance(prompt, Mapping):
            inner = prompt.get("prompt_token_ids", prompt.get("prompt"))
            if inner is None:
                raise RequestError('prompt: a mapping needs "prompt" or "prompt_token_ids"', "prompt")
            return self._tokens(inner, add_special)
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("prompt: this engine has no tokenizer, pass token ids", "prompt")
            tokens = array("i", self.tokenizer.encode(prompt, add_special=add_special))
            if not tokens:
                raise RequestError("prompt is empty: the text has no tokens", "prompt")
            return prompt, tokens
        items: Any = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if isinstance(items, (bytes, bytearray)) or not isinstance(items, (Sequence, array)):
            raise RequestError(f"prompt must be text or token ids, not {type(prompt).__name__}", "prompt")
        if not items:
            raise RequestError("prompt is empty: it has no tokens", "prompt")
        for token in items:
            if isinstance(token, (bool, float, str)) or not hasattr(token, "__index__"):
                raise RequestError(f"prompt must hold token ids, not {token!r}", "prompt")
        try:
            return None, array("i", [int(t) for t in items])
        except OverflowError:
            wrong = next(t for t in items if not -(2**31) <= int(t) < 2**31)
            raise RequestError(f"prompt: token id {wrong} is outside the vocabulary", "prompt") from None

    def _check_ids(self, field: str, ids: Any) -> None:
        for token in ids:
            if not 0 <= token < self.vocab:
                raise RequestError(f"{field}: token id {token} is outside the vocabulary of {self.vocab}", field)

    def _limit(self, prompt: int, max_tokens: int | None) -> int:
        """The most tokens, prompt and output, that the request will have."""
        wanted = prompt + (1 if max_tokens is None else max_tokens)
        what = f"{prompt} prompt tokens" + ("" if max_tokens is None else f" + max_tokens {max_tokens}")
        field = "prompt" if max_tokens is None or prompt >= min(self.context, self.longest) else "max_tokens"
        if wanted > self.context:
            raise RequestError(
                f"{what} = {wanted} tokens exceed the context of {self.context} tokens",
                field,
                "context_length_exceeded",
            )
        if wanted > self.longest:
            raise RequestError(
                f"{what} = {wanted} tokens exceed the {self.longest} tokens that the whole KV cache can hold",
                field,
                "context_length_exceeded",
            )
        return min(self.context, self.longest) if max_tokens is None else wanted

    def _rules(self, params: SamplingParams) -> Rules:
        ends = params.stop_token_ids if params.ignore_eos else (*self.eos_ids, *params.stop_token_ids)
        words = tuple(params.bad_words)
        if not words:
            return Rules(tuple(ends))
        if self.tokenizer is None:
            raise RequestError("bad_words: this engine has no tokenizer", "bad_words")
        if words not in self._bad:
            if len(self._bad) >= 256:  # the cache is a convenience, not a leak
                self._bad.clear()
            self._bad[words] = tuple(token_sequences(self.tokenizer, words))
        return Rules(tuple(ends), self._bad[words])
