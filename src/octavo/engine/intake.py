"""From what a user passes to a request that is sure to fit, or one clear error."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.core.params import SamplingParams
from octavo.core.request import Request, Sink
from octavo.decode.branching import Rules
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
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab = vocab
        self.context = context
        self.longest = longest
        self.eos_ids = eos_ids
        self.defaults = dict(defaults or {})
        self._now = now
        self._requests = 0
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
        self._requests += 1
        return Request(
            id if id is not None else f"req-{self._requests}",
            self._requests,
            tokens,
            params,
            self._rules(params),
            limit,
            prompt_text=text,
            priority=priority,
            user=user,
            salt=b"" if cache_salt is None else b"user:" + cache_salt.encode("utf-8", "surrogatepass"),
            arrival=self._now(),
            sink=sink,
        )

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
