"""What a model writes as the parts of a response, each token where it belongs."""

from __future__ import annotations

from collections import deque
from typing import Any

from octavo.server.answers import Piece
from octavo.server.parsing import OutputParser, Part
from octavo.text.detokenize import Detokenizer
from octavo.text.tools import TextPiece

Entries = list[dict[str, Any]]  # log-probabilities of tokens, as chats have them
Read = list[tuple[Part, Entries]]


class Reading:
    """Owns: the text of one answer that is not told yet, and which tokens it is made of.

    Promises: what it tells, joined, depends on the answer alone, not on how it was cut into pieces: text is parsed one
    token after another.  Log-probabilities go with the text that their tokens say; those of thoughts, of calls and of
    the marks around them are left out.
    """

    def __init__(self, parser: OutputParser | None, text: Detokenizer) -> None:
        self.thoughts = 0  # tokens up to where the answer begins
        self._parser = parser
        self._tokens_text = text
        self._tokens = 0
        self._unread = ""
        self._waiting: deque[tuple[int, Entries]] = deque()  # tokens whose text is to be read: characters, entries
        self._unsaid: list[tuple[int, Entries]] = []  # tokens that were read, and may be part of a text to come
        self._last: Part | None = None
        self._told: Read = []

    def read(self, piece: Piece) -> Read:
        """The parts that are new, in order; with its finish reason also what was held back."""
        entries = piece.logprobs["content"] if piece.logprobs is not None else []
        ended = piece.finish_reason is not None
        self._told = []
        if self._parser is None:
            self._plain(piece.text, entries)
        else:
            self._unread += piece.text
            for i, token in enumerate(piece.tokens):
                self._waiting.append((len(self._tokens_text.push(token)), entries[i : i + 1]))
            self._parse(self._parser, ended)
        if ended:
            self._end()
        return self._told

    def _plain(self, text: str, entries: Entries) -> None:
        """All is text: only log-probabilities of tokens that are no whole character yet wait for it."""
        self._unsaid += [(0, [entry]) for entry in entries]
        if text:
            self._tell(TextPiece(text), self._all_unsaid())

    def _parse(self, parser: OutputParser, ended: bool) -> None:
        while self._waiting and (ended or self._waiting[0][0] <= len(self._unread)):
            length, entries = self._waiting.popleft()
            text, self._unread = self._unread[:length], self._unread[length:]
            thinking = parser.thinking
            self._unsaid.append((len(text), entries))
            self._take(parser.parts(text))
            self._tokens += 1
            if thinking or parser.thinking:
                self.thoughts = self._tokens
        if ended:  # a character that never became whole may be left
            self._take(parser.parts(self._unread) + parser.rest())

    def _take(self, parts: list[Part]) -> None:
        if not parts:
            return
        said = sum(len(part.text) for part in parts if isinstance(part, TextPiece))
        entries = self._saying(said) if said else []
        self._unsaid = []
        for part in parts:
            is_text = isinstance(part, TextPiece)
            self._tell(part, entries if is_text else [])
            entries = [] if is_text else entries

    def _saying(self, said: int) -> Entries:
        """Of the last tokens, which say so many characters; before them stand marks."""
        total = sum(length for length, _ in self._unsaid)
        start = 0
        while total > said and total - self._unsaid[start][0] >= said:
            total -= self._unsaid[start][0]
            start += 1
        return [entry for _, entries in self._unsaid[start:] for entry in entries]

    def _end(self) -> None:
        """Tokens that say nothing, such as the end's, go with a text that nothing follows; nothing at all is one."""
        entries = self._all_unsaid()
        if self._last is None or (entries and isinstance(self._last, TextPiece)):
            self._tell(TextPiece(""), entries)

    def _all_unsaid(self) -> Entries:
        unsaid, self._unsaid = self._unsaid, []
        return [entry for _, entries in unsaid for entry in entries]

    def _tell(self, part: Part, entries: Entries) -> None:
        self._last = part
        self._told.append((part, entries))
