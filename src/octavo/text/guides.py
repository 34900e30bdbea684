"""Guides compiled against a model's tokens with llguidance: which token may come next."""

from __future__ import annotations

import importlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache
from typing import Any

from octavo.core.guide import Guide
from octavo.errors import EngineError, RequestError
from octavo.text.tokenizer import Tokenizer

KEPT = 64  # compiled guides that are remembered
THREADS = 2  # that compute masks; a mask is some ten microseconds
# One way to write white space, and nowhere more than one: a model that loves spaces could fill an output with them.
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


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
        if guide.kind == "choice":
            rows = [tuple(self._tokenizer.encode_inside(text)) for text in _texts(guide.value)]
            return Form(_Choices(rows, self.ends, self._tokenizer.vocab_size), self)
        try:
            matcher = self._library.LLMatcher(self._tokens, self._grammar(guide), log_level=0)
            first = b"" if matcher.is_error() else matcher.compute_bitmask()  # some are too complex for even that
            error = matcher.get_error()
            if error.startswith("NoExtension") or not (error or any(first)):
                error = "nothing fulfils it"
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
        self._encode = lru_cache(4096)(tokenizer.encode_inside)  # the same few texts come again and again

    def __call__(self, text: str | bytes) -> list[int]:
        """What the guide leaves no choice about is written in the model's own tokens."""
        if isinstance(text, bytes):
            raise TypeError("text, please")  # the question whether bytes would do
        return self._encode(text)


class _Choices:
    """Follows one of several texts, with the methods of llguidance's matcher.

    Each text has one way to be written, the tokenizer's own.  As a grammar it would have many, and a first letter that
    the model likes for a reason of its own would decide for a text that it does not like.
    """

    def __init__(self, rows: list[tuple[int, ...]], ends: tuple[int, ...], vocabulary: int) -> None:
        self._rows, self._ends, self._vocabulary = rows, ends, vocabulary  # what may still follow

    def deep_copy(self) -> _Choices:
        return _Choices(self._rows, self._ends, self._vocabulary)

    def consume_tokens(self, tokens: Sequence[int]) -> None:
        head = tuple(tokens)
        self._rows = [row[len(head) :] for row in self._rows if row[: len(head)] == head]

    def compute_bitmask(self) -> bytes:
        mask = bytearray((self._vocabulary + 31) // 32 * 4)
        for row in self._rows:
            for token in row[:1] or self._ends:
                mask[token >> 3] |= 1 << (token & 7)
        return bytes(mask)

    def is_error(self) -> bool:
        return not self._rows

    def get_error(self) -> str:
        return "a token was drawn that begins no choice"


class Form:
    """A compiled guide, ready to be followed by any number of outputs."""

    def __init__(self, native: Any, guides: Guides) -> None:
        self._native, self._guides = native, guides

    def matcher(self, held: int) -> Matcher:
        """For a new output; end tokens are ``held`` back until it has so many tokens, or the guide allows no other."""
        return Matcher(self._native.deep_copy(), self._guides, held)


class Matcher:
    """Owns: where in its guide one output is.

    Promises: a mask depends on the output's tokens alone.  All that takes time happens in the guides' threads, between
    a mask's ``begin`` and its ``bits``; the other methods are to be called outside of that.
    """

    def __init__(self, native: Any, guides: Guides, held: int, count: int = 0, unread: tuple[int, ...] = ()) -> None:
        self._native, self._guides = native, guides
        self._held, self._count = held, count
        self._unread = list(unread)  # tokens that ``native`` has not seen yet
        self._mask: Pending | None = None

    def advance(self, token: int) -> None:
        """The output has one more token."""
        self._count += 1
        self._unread.append(token)
        self._mask = None

    def mask(self) -> Pending:
        """Of the next token; where the guide is fulfilled and nothing could follow, it allows end tokens only."""
        if self._mask is None:
            self._mask = Pending(self._guides.pool, self._compute)
        return self._mask

    def fork(self) -> Matcher:
        """Another output that begins with the same tokens."""
        return Matcher(self._native.deep_copy(), self._guides, self._held, self._count, tuple(self._unread))

    def _compute(self) -> bytes:
        self._native.consume_tokens(self._unread)
        self._unread.clear()
        mask: bytes = self._native.compute_bitmask()
        if self._native.is_error():
            raise EngineError(f"the guide cannot be followed: {_first_line(self._native.get_error())}")
        return _without(mask, self._guides.ends) if self._count < self._held else mask


class Pending:
    """A mask, computed beside other things (:class:`octavo.core.plan.Mask`)."""

    def __init__(self, pool: ThreadPoolExecutor, compute: Callable[[], bytes]) -> None:
        self._pool, self._compute = pool, compute
        self._future: Future[bytes] | None = None

    def begin(self) -> None:
        if self._future is None:
            self._future = self._pool.submit(self._compute)

    def bits(self) -> bytes:
        """Waits.  Raises EngineError if the guide has become too complex to follow."""
        self.begin()
        assert self._future is not None
        return self._future.result()


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
