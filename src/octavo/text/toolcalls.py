"""Reads tool calls out of an output as it streams; :mod:`octavo.text.tools` says which model writes them how.

A *section* is a stretch of text that may be calls: it starts at a mark or, where a format has calls without one, at
the first character of the output.  Each section is a coroutine that takes one character at a time; it tells of calls
as soon as they are certain, and raises :class:`Broken` when the text turns out to be none.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass

from octavo.text.jsonscan import JsonScanner


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


# ---- sections ------------------------------------------------------------------------------------------------------

NAME_KEYS = ("name", "function")
ARGUMENT_KEYS = ("arguments", "parameters")
OTHER_KEYS = ("type", "id")


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


def tagged(end: str) -> Callable[[ToolStream], Section]:
    """After a start mark: one call as a JSON object, then ``end``."""

    def section(out: ToolStream) -> Section:
        char = yield from spaces()
        yield from json_call(out, char, marked=True)
        out.complete()
        char = yield from spaces()
        yield from literal(end, char)

    return section


def json_calls(marked: bool) -> Callable[[ToolStream], Section]:
    """Calls as JSON objects, separated by semicolons or white space."""

    def section(out: ToolStream) -> Section:
        char = yield from spaces()
        while True:
            yield from json_call(out, char, marked)
            out.complete()
            char = yield from spaces()
            if char == ";":
                char = yield from spaces()
            if char != "{":
                raise Broken
            out.reopen()

    return section


def json_list(marked: bool, named: bool = False) -> Callable[[ToolStream], Section]:
    """Calls as a JSON list of objects, or one object; with ``named`` also as a name, [ARGS] and an object."""

    def section(out: ToolStream) -> Section:
        char = yield from spaces()
        if named and char not in "[{":
            yield from named_call(out, char)
        elif char == "{":
            yield from json_call(out, char, marked)
        else:
            yield from literal("[", char)
            char = yield from spaces()
            yield from items(out, char, lambda char: json_call(out, char, marked))
        out.complete()

    return section


def json_or_python_list(out: ToolStream) -> Section:
    """A list of calls, as JSON objects or as Python writes them."""
    char = yield from spaces()
    yield from literal("[", char)
    char = yield from spaces()
    if char == "{":
        yield from items(out, char, lambda char: json_call(out, char, marked=False))
    else:
        yield from items(out, char, lambda char: python_call(out, char))


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


def named_call(out: ToolStream, char: str) -> Section:
    """A name, perhaps [CALL_ID] and an id, perhaps [ARGS], then the arguments."""
    name = ""
    while char not in "{[":
        if not (char.isalnum() or char in "_-. "):
            raise Broken
        name += char
        char = yield
    marks = ""
    while char != "{" and not marks.endswith("[ARGS]"):
        marks += char
        char = yield
    if char.isspace():
        char = yield from spaces()
    yield from literal("{", char)
    if not (name := name.strip()):
        raise Broken
    yield from _object(out, name, JsonScanner(), char)


def json_call(out: ToolStream, char: str, marked: bool) -> Section:
    """An object with a name and arguments, in either order; where a mark came before, other keys pass.

    Without arguments it is a call only after a mark.
    """
    scan = JsonScanner()
    yield from literal("{", char)
    scan.push(char)
    name: str | None = None
    held: str | None = None  # arguments that came before the name
    started = False
    while not scan.done:
        key = yield from _key(scan)
        if key is None:
            break
        known = key in NAME_KEYS or key in ARGUMENT_KEYS
        if not known and not marked and key not in OTHER_KEYS:
            raise Broken
        char = yield from _value_start(scan)
        if key in ARGUMENT_KEYS and name and char == "{" and not started:
            started = True
            yield from _object(out, name, scan, char)
            continue
        text = yield from _value(scan, char)
        if key in NAME_KEYS and name is None and text.startswith('"'):
            name = json.loads(text)
        elif key in ARGUMENT_KEYS and not started:
            held = _unwrapped(text)
    if started:
        return
    if not name or (held is None and not marked):
        raise Broken
    out.start(name)
    out.arguments(held or "{}")


def _key(scan: JsonScanner) -> Generator[None, str, str | None]:
    """The next key of the object, up to its colon; None when the object ends."""
    key = ""
    while scan.expect != "value":
        char = yield
        _take(scan, char)
        if scan.done:
            return None
        if scan.inside or key:
            key += char
    return str(json.loads(key.rstrip().removesuffix(":").rstrip(), strict=False))


def _value_start(scan: JsonScanner) -> Generator[None, str, str]:
    char = yield from spaces()
    _take(scan, char)
    return char


def _value(scan: JsonScanner, char: str) -> Generator[None, str, str]:
    """The text of a value inside an object, ``char`` being its first character."""
    text, bare = char, char not in "{["
    depth = scan.depth if bare else scan.depth - 1
    while scan.inside or scan.depth > depth:
        ends_outside = bare and scan.inside == "number"  # by a character of the object around it
        char = yield
        safe = _safe(scan, char)
        _take(scan, char)
        if ends_outside and not scan.inside:
            break
        text += safe
    return text


def _object(out: ToolStream, name: str, scan: JsonScanner, char: str) -> Section:
    """Streams the arguments, of which ``scan`` may have taken the bracket already."""
    if not scan.depth:
        scan.push(char)
    depth = scan.depth - 1
    out.start(name)
    out.arguments(char)
    while scan.depth > depth:
        char = yield
        safe = _safe(scan, char)
        _take(scan, char)
        out.arguments(safe)


def _take(scan: JsonScanner, char: str) -> None:
    if not scan.push(char):
        raise Broken


def _safe(scan: JsonScanner, char: str) -> str:
    """A control character inside a string as JSON wants it."""
    return json.dumps(char)[1:-1] if scan.inside == "string" and char < " " else char


def _unwrapped(text: str) -> str:
    """Arguments as an object's text: some models write them as a string of JSON, or null for none."""
    try:
        value = json.loads(text)
        if isinstance(value, str):
            text = value
            value = json.loads(value, parse_constant=_no_json)
    except (ValueError, RecursionError):
        raise Broken from None
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise Broken
    return text


def _no_json(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


# ---- calls written as Python ---------------------------------------------------------------------------------------


def python_block(out: ToolStream) -> Section:
    """After the fence that begins a code block: calls, one after the other, and the fence that ends it."""
    char = yield from spaces()
    while True:
        yield from python_call(out, char)
        out.complete()
        char = yield from spaces()
        if char == "`":
            yield from literal("```", char)
            return
        if not char.isidentifier():
            raise Broken
        out.reopen()


def python_call(out: ToolStream, char: str) -> Section:
    """``f(a=1, b="x")``"""
    name = ""
    while char != "(":
        if not (char.isalnum() or char in "_."):
            raise Broken
        name += char
        char = yield
    if not all(part.isidentifier() for part in name.split(".")):
        raise Broken
    count = 0
    while True:
        piece, last = yield from _argument()
        if piece.strip() or not last:
            key, value = _assigned(piece)
            if not count:
                out.start(name)
            out.arguments(("{" if not count else ", ") + f"{json.dumps(key)}: {value}")
            count += 1
        if last:
            break
    if not count:
        out.start(name)
    out.arguments("}" if count else "{}")


def _argument() -> Generator[None, str, tuple[str, bool]]:
    """The text of one argument, and whether it is the last."""
    text, quote, depth = "", "", 0
    while True:
        char = yield
        if quote:
            if char == "\\":
                text += char
                char = yield
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif depth == 0 and char in ",)":
            return text, char == ")"
        elif char in ")]}":
            depth -= 1
        text += char


def _assigned(piece: str) -> tuple[str, str]:
    """``key=value`` with a Python literal, or one of JSON's own words, as a key and JSON."""
    key, equals, value = piece.partition("=")
    key, value = key.strip(), value.strip()
    if not equals or not key.isidentifier():
        raise Broken
    try:
        literal = {"true": "True", "false": "False", "null": "None"}.get(value, value)
        return key, json.dumps(ast.literal_eval(literal), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise Broken from None
