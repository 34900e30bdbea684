"""Tool calls as models write them in JSON: sections of :mod:`octavo.text.toolcalls`."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator

from octavo.text.jsonscan import JsonScanner
from octavo.text.toolcalls import Broken, Section, ToolStream, items, literal, spaces

NAME_KEYS = ("name", "function")
ARGUMENT_KEYS = ("arguments", "parameters")
OTHER_KEYS = ("type", "id")


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
