"""JSON read one character at a time: is what has come so far the beginning of a value?"""

from __future__ import annotations

import re

MAX_DEPTH = 100
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_NUMBER_SO_FAR = re.compile(r"-?(?:(?:0|[1-9]\d*)(?:(?:\.\d*)?|(?:\.\d+)?[eE][+-]?\d*))?", re.ASCII)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)


class JsonScanner:
    """Owns: where in a JSON value the text read so far ends.

    Promises: once :meth:`push` has returned False, no text that begins so is JSON (RFC 8259; nested at most MAX_DEPTH
    deep).  One liberty: control characters stand in strings as they are, because models write them.

    ``expect`` is what may come next outside of strings, numbers and literals: "value", "value or end", "key",
    "key or end", "colon", "comma or end", "nothing".
    """

    def __init__(self) -> None:
        self.expect = "value"
        self.stack: list[str] = []  # open brackets
        self.inside = ""  # "string", "number", "literal" or ""
        self._token = ""
        self._escape = -1  # -1: none; 0: after the backslash; 1..4: hex digits still to come

    @property
    def depth(self) -> int:
        return len(self.stack)

    @property
    def done(self) -> bool:
        """Whether a whole value has been read (a number on its own is done with what follows it)."""
        return self.expect == "nothing" and not self.inside

    def push(self, char: str) -> bool:
        if self.inside == "string":
            return self._string(char)
        if self.inside == "literal":
            return self._literal(char)
        if self.inside == "number":
            if _NUMBER_SO_FAR.fullmatch(self._token + char):
                self._token += char
                return True
            if not _NUMBER.fullmatch(self._token):
                return False
            self._close_value()
        return self._structure(char)

    def _structure(self, char: str) -> bool:
        if char in " \t\n\r":
            return True
        expect = self.expect
        if expect == "colon":
            self.expect = "value"
            return char == ":"
        if char == '"' and expect in ("key", "key or end", "value", "value or end"):
            self.inside = "string"
            return True
        if char in "]}":
            ends = expect in ("comma or end", "key or end" if char == "}" else "value or end")
            if not ends or not self.stack or self.stack[-1] != ("{" if char == "}" else "["):
                return False
            self.stack.pop()
            self._close_value()
            return True
        if expect == "comma or end":
            self.expect = "key" if self.stack[-1] == "{" else "value"
            return char == ","
        return expect in ("value", "value or end") and self._open_value(char)

    def _open_value(self, char: str) -> bool:
        if char in "{[":
            self.stack.append(char)
            self.expect = "key or end" if char == "{" else "value or end"
            return len(self.stack) <= MAX_DEPTH
        if char in _LITERALS:
            self.inside, self._token = "literal", char
            return True
        self.inside, self._token = "number", char
        return char == "-" or char in "0123456789"

    def _close_value(self) -> None:
        self.inside = ""
        self.expect = "comma or end" if self.stack else "nothing"

    def _literal(self, char: str) -> bool:
        self._token += char
        word = _LITERALS[self._token[0]]
        if self._token == word:
            self._close_value()
        return word.startswith(self._token)

    def _string(self, char: str) -> bool:
        if self._escape == 0:
            self._escape = 4 if char == "u" else -1
            return char in '"\\/bfnrtu'
        if self._escape > 0:
            self._escape = self._escape - 1 or -1
            return char in "0123456789abcdefABCDEF"
        if char == "\\":
            self._escape = 0
        elif char == '"':
            if self.expect.startswith("key"):
                self.inside, self.expect = "", "colon"
            else:
                self._close_value()
        return True
