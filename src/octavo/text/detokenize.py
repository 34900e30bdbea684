"""Ids to text, token by token."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from octavo.text.tokenizer import Tokenizer


class Detokenizer:
    """Owns the bytes of one output that are not yet a whole character.

    Promises: what ``push`` and ``flush`` gave, joined, equals ``Tokenizer.decode`` of all ids; text once given is never
    taken back.  A character whose bytes come in several tokens is held until it is whole; if it never will be,
    it is one replacement mark, at the latest from ``flush``.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._raw = tokenizer.token_bytes
        self._skipped: frozenset[int] = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = tokenizer.strips_space

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` makes final; may be empty."""
        if token_id in self._skipped:
            return ""
        return self._started(self._decoder.decode(self._raw(token_id)))

    def push_all(self, ids: Iterable[int]) -> str:
        return "".join(map(self.push, ids))

    def flush(self) -> str:
        """The rest, once no token follows: "" or one replacement mark."""
        return self._started(self._decoder.decode(b"", final=True))

    def _started(self, text: str) -> str:
        # SentencePiece's first space came with the tokenizer, not from the model; decode drops it too.
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text
