"""Tool calls written as Python: sections of :mod:`octavo.text.toolcalls`."""

from __future__ import annotations

import ast
import json
from collections.abc import Generator

from octavo.text.jsoncalls import json_call
from octavo.text.toolcalls import Broken, Section, ToolStream, items, literal, spaces


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


def json_or_python_list(out: ToolStream) -> Section:
    """A list of calls, as JSON objects or as Python writes them."""
    char = yield from spaces()
    yield from literal("[", char)
    char = yield from spaces()
    if char == "{":
        yield from items(out, char, lambda char: json_call(out, char, marked=False))
    else:
        yield from items(out, char, lambda char: python_call(out, char))
