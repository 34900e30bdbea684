"""Reads tool calls out of an output as it streams; :mod:`octavo.text.tools` says which model writes them how.

A *section* is a stretch of text that may be calls: it starts at a mark or, where a format has calls without one, at
the first character of the output.  Each section is a coroutine that takes one character at a time; it tells of calls
as soon as they are certain, and raises :class:`Broken` when the text turns out to be none.  Sections of calls in JSON
are in ``jsoncalls``, of calls written as Python in ``pythoncalls``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass


@dataclass(frozen=True)
class TextPiece:
    """Text that is part of no call."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins; ``index`` counts the calls of the output from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments: the pieces of a whole call join to a JSON object."""

    index: int
    text: str


Piece = TextPiece | CallStart | CallArguments
Section = Generator[None, str, None]


class Broken(Exception):
    """The section's text is no call."""


class ToolStream:
    """Owns: the text that may yet turn out to be a call, and the number of calls so far.

    Promises: pieces, joined, depend on the text alone, not on how it was cut.  A call is told of once its name is known
    and its arguments have begun; these then come as the model writes them.  Text that only looks like a call comes back
    as text.  A call that breaks off stays as far as it has come, and what follows is text: nothing is made up, nothing
    is lost but marks and the white space around calls.

    ``marks``: what starts a section in the middle of text.  ``openers``: single characters that start one where no text
    has come yet.  ``names``: the tools that there are, if known: a call of another one is text.
    """

    def __init__(
        self,
        marks: dict[str, Callable[[ToolStream], Section]],
        openers: dict[str, Callable[[ToolStream], Section]],
        names: Collection[str] | None = None,
    ) -> None:
        self._marks, self._openers, self._names = marks, openers, names
        self._pieces: list[CallStart | tuple[int, list[str]]] = []  # (-1: text, or a call's number; what joins to it)
        self._calls = 0
        self._section: Section | None = None
        self._raw = ""  # of the section: what has not been told
        self._closing = False  # the section's call is whole; only marks are still to come
        self._blank = True  # no text since the start or since a call
        self._space = ""  # white space that is text only if text follows
        self._held = ""  # the beginning of a mark, perhaps

    def feed(self, text: str) -> list[Piece]:
        for char in text:
            self._push(char)
        return self._drain()

    def finish(self) -> list[Piece]:
        """What was held back, once no text follows."""
        if self._section is not None:
            if not self._closing:
                self._text(self._raw)
            self._section, self._raw = None, ""
        self._text(self._held)
        if not self._calls and self._space:
            self._add(-1, self._space)
        self._held = self._space = ""
        return self._drain()

    # ---- told by sections ------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        if self._names is not None and name not in self._names:
            raise Broken
        self._pieces.append(CallStart(self._calls, name))
        self._calls += 1
        self._told()

    def arguments(self, text: str) -> None:
        self._add(self._calls - 1, text)
        self._told()

    def complete(self) -> None:
        """The call is whole."""
        self._told()
        self._closing = True

    def reopen(self) -> None:
        """Another call has begun in the same section."""
        self._closing = False

    def _told(self) -> None:
        self._raw = self._space = ""

    # ---- characters ------------------------------------------------------------------------------------------------

    def _push(self, char: str) -> None:
        if self._section is None:
            self._outside(char)
            return
        self._raw += char
        try:
            self._section.send(char)
        except StopIteration:
            self._end_section()
            self._blank = True
        except Broken:
            whole = self._closing  # the call was; what follows it is anything
            raw = self._end_section()
            if whole:
                self._blank = True
            else:
                self._text(raw[:-1] or raw)  # its last character may start something else
                raw = raw[-1:] if len(raw) > 1 else ""
            for again in raw:
                self._push(again)

    def _end_section(self) -> str:
        raw, self._raw = self._raw, ""
        self._section, self._closing = None, False
        return raw

    def _outside(self, char: str) -> None:
        """A character where text is expected."""
        if self._blank and not self._held and char.isspace():
            self._space += char
            return
        self._held += char
        while self._held and not any(mark.startswith(self._held) for mark in self._marks):
            first, rest = self._held[0], self._held[1:]
            if self._blank and first in self._openers:
                self._held = ""
                self._begin(self._openers[first], self._space, first)
                for later in rest:
                    self._push(later)
                return
            self._text(first)
            self._held = rest
        if self._held in self._marks:
            mark, self._held = self._held, ""
            self._begin(self._marks[mark], self._space + mark)

    def _begin(self, section: Callable[[ToolStream], Section], raw: str, first: str = "") -> None:
        self._space = ""
        self._raw = raw
        self._section = section(self)
        next(self._section)
        if first:
            self._push(first)

    def _text(self, text: str) -> None:
        """Text for certain, and with it the white space that waited for some."""
        if text:
            text, self._space = self._space + text, ""
            self._blank = False
            self._add(-1, text)

    def _add(self, call: int, text: str) -> None:
        """More of a call's arguments, or of the text (call -1)."""
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, tuple) and last[0] == call:
            last[1].append(text)
        else:
            self._pieces.append((call, [text]))

    def _drain(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return [piece if isinstance(piece, CallStart) else _joined(*piece) for piece in pieces]


def _joined(call: int, parts: list[str]) -> TextPiece | CallArguments:
    text = "".join(parts)
    return TextPiece(text) if call < 0 else CallArguments(call, text)


# ---- what sections are made of ---------------------------------------------------------------------------------------


def spaces() -> Generator[None, str, str]:
    """The next character that is no white space."""
    while (char := (yield)).isspace():
        pass
    return char


def literal(text: str, char: str) -> Generator[None, str, None]:
    """Exactly ``text``, of which ``char`` is there already."""
    for position, wanted in enumerate(text):
        if position:
            char = yield
        if char != wanted:
            raise Broken


def items(out: ToolStream, char: str, call: Callable[[str], Section]) -> Section:
    """Calls with commas between them, up to the bracket that closes the list."""
    while True:
        yield from call(char)
        out.complete()
        char = yield from spaces()
        if char == "]":
            return
        yield from literal(",", char)
        char = yield from spaces()
        out.reopen()


def fenced(inner: Callable[[ToolStream], Section]) -> Callable[[ToolStream], Section]:
    """Calls, then the fence that ends the code block."""

    def section(out: ToolStream) -> Section:
        yield from inner(out)
        out.complete()
        char = yield from spaces()
        yield from literal("```", char)

    return section
