"""Guides compiled against a model's tokens with llguidance: which token may come next."""

from __future__ import annotations

import importlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

from octavo.core.guide import Guide
from octavo.errors import EngineError, RequestError
from octavo.text.tokenizer import Tokenizer

KEPT = 64  # compiled guides that are remembered
THREADS = 2  # that compute masks; a mask is some ten microseconds
# One way to write white space, and nowhere more than one: a model that loves spaces could fill an output with them.
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_SPECIAL = frozenset(r"\.+*?()|[]{}^$#&-~/")  # in a regular expression


class Guides:
    """Owns: the tokenizer in llguidance's form, the guides compiled last, the threads that compute masks.

    Promises: :meth:`compile` may be called from any thread; a guide that cannot be compiled is refused there.
    """

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int]) -> None:
        """``ends``: the tokens that end an output, allowed wherever the guide is fulfilled."""
        self._tokenizer = tokenizer
        self.ends = tuple(i for i in ends if i < tokenizer.vocab_size)
        self._forms: OrderedDict[Guide, Form] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, guide: Guide) -> Form:
        """Raises RequestError, field "guide", for what is no valid schema, expression or grammar."""
        with self._lock:
            if guide not in self._forms:
                self._forms[guide] = self._compiled(guide)
                if len(self._forms) > KEPT:
                    self._forms.popitem(last=False)
            self._forms.move_to_end(guide)
            return self._forms[guide]

    def _compiled(self, guide: Guide) -> Form:
        if not self.ends:
            raise RequestError("guide: this model has no token that ends an output", "guide")
        try:
            matcher = self._library.LLMatcher(self._tokens, self._grammar(guide), log_level=0)
            error = matcher.get_error()
        except ValueError as wrong:  # of text that is no Unicode, say
            error = str(wrong)
        if error:
            raise RequestError(
                f"guide: this {guide.kind.replace('_', ' ')} cannot be used: {_first_line(error)}", "guide"
            )
        return Form(matcher, self)

    def _grammar(self, guide: Guide) -> str:
        native = self._library.LLMatcher
        if guide.kind == "json_object":
            return str(native.grammar_from_json_schema({"type": "object"}, defaults=COMPACT))
        if guide.kind == "json_schema":
            return str(native.grammar_from_json_schema(json.dumps(_schema(guide.value)), defaults=COMPACT))
        if guide.kind == "regex":
            return str(native.grammar_from_regex(guide.value))
        if guide.kind == "choice":
            choices = "|".join("".join(f"\\{c}" if c in _SPECIAL else c for c in text) for text in _texts(guide.value))
            return str(native.grammar_from_regex(f"(?:{choices})"))
        return str(native.grammar_from_lark(guide.value))

    @cached_property
    def _library(self) -> Any:
        try:
            return importlib.import_module("llguidance")
        except ImportError:
            message = "guide: structured output needs llguidance (pip install octavo[server])"
            raise RequestError(message, "guide") from None

    @cached_property
    def _tokens(self) -> Any:
        """Takes a tenth of a second for 50,000 tokens, so it is made when the first guide comes."""
        tokens = self._library.TokenizerWrapper(_Tokens(self._tokenizer, self.ends[0]))
        return self._library.LLTokenizer(tokens, n_vocab=self._tokenizer.vocab_size, eos_token=list(self.ends))

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(THREADS, "octavo-guides")


class _Tokens:
    """A tokenizer as llguidance wants to see it."""

    def __init__(self, tokenizer: Tokenizer, end: int) -> None:
        self.eos_token_id = end
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._encode = tokenizer.encode_inside

    def __call__(self, text: str | bytes) -> list[int]:
        """What the guide leaves no choice about is written in the model's own tokens."""
        if isinstance(text, bytes):
            raise TypeError("text, please")  # the question whether bytes would do
        return self._encode(text)


class Form:
    """A compiled guide, ready to be followed by any number of outputs."""

    def __init__(self, native: Any, guides: Guides) -> None:
        self._native, self._guides = native, guides

    def matcher(self, held: int) -> Matcher:
        """For a new output; end tokens are ``held`` back until it has so many tokens, or the guide allows no other."""
        return Matcher(self._native.deep_copy(), self._guides, held)


class Pending:
    """A mask that is being computed (:class:`octavo.core.plan.Mask`)."""

    def __init__(self, future: Future[bytes]) -> None:
        self._future = future

    def bits(self) -> bytes:
        """Waits.  Raises EngineError if the guide has become too complex to follow."""
        return self._future.result()


class Matcher:
    """Owns: where in its guide one output is, and the mask of what may come next, on its way.

    Promises: the mask depends on the output's tokens alone; computing it holds up nobody who does not ask for it.
    """

    def __init__(self, native: Any, guides: Guides, held: int, count: int = 0) -> None:
        self._native, self._guides = native, guides
        self._held, self._count = held, count
        self._mask: Pending | None = None

    def advance(self, token: int) -> bool:
        """The output has one more token.  True if it is complete: nothing could follow."""
        self._count += 1
        self._mask = None
        if self._native.consume_token(token) and self._native.is_stopped():
            return True
        self.begin()
        return False

    def begin(self) -> Pending:
        """The mask of the next token; computing it begins with the first call."""
        if self._mask is None:
            self._mask = Pending(self._guides.pool.submit(self._compute))
        return self._mask

    def fork(self) -> Matcher:
        """Another output that begins with the same tokens."""
        return Matcher(self._native.deep_copy(), self._guides, self._held, self._count)

    def _compute(self) -> bytes:
        mask: bytes = self._native.compute_bitmask()
        if self._native.is_error():
            raise EngineError(f"the guide cannot be followed: {_first_line(self._native.get_error())}")
        return _without(mask, self._guides.ends) if self._count < self._held else mask


def _without(mask: bytes, ids: Sequence[int]) -> bytes:
    """The mask without these tokens, unless they are all that is left."""
    fewer = bytearray(mask)
    for i in ids:
        fewer[i >> 3] &= ~(1 << (i & 7))
    return mask if fewer.count(0) == len(fewer) else bytes(fewer)


# ---- guides as they are given --------------------------------------------------------------------------------------


def _schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"guide: the JSON schema is no JSON: {error}", "guide") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise RequestError("guide: a JSON schema must be an object", "guide")
    return schema


def _texts(text: str) -> list[str]:
    try:
        texts = json.loads(text)
    except (ValueError, RecursionError):
        texts = None
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) and t for t in texts):
        raise RequestError("guide: choices must be a JSON list of texts; use Guide.choice", "guide")
    return texts


def _first_line(message: str) -> str:
    line = next((line.strip() for line in message.splitlines() if line.strip()), "no reason given")
    return line[:300]
