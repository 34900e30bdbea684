"""What a model writes, told apart: thoughts, tool calls, and what it says."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from octavo.text.chat import ChatTemplate
from octavo.text.reasoning import ReasoningStream
from octavo.text.tools import FORMATS, CallStart, Piece, TextPiece, ToolFormat, ToolStream, tool_format

OPEN, CLOSE = "<think>", "</think>"
Calls = tuple[dict[str, Any], ...]


class Parsed(NamedTuple):
    """New text, told apart; ``calls`` are tool call deltas in OpenAI's shape."""

    content: str = ""
    reasoning: str = ""
    calls: Calls = ()


@dataclass(frozen=True)
class Thought:
    """Text that is not part of the answer."""

    text: str


Part = Thought | Piece


class Parser(Protocol):
    """Tells apart what a model writes into one stream of text: thoughts, tool calls, and what it says."""

    def feed(self, text: str) -> Parsed: ...

    def finish(self) -> Parsed:
        """What was held back, when no more text comes."""
        ...

    def reason(self, reason: str) -> str:
        """The finish reason, given the engine's."""
        ...


class Tooling:
    """Owns: how this model writes tool calls and thoughts.

    Promises: a model whose template knows no tools is told of them in words, so that tools are never lost in silence.
    """

    def __init__(self, template: ChatTemplate, name: str | None, reasoning: str) -> None:
        source = template.source
        self._known = template.takes_tools
        self.format: ToolFormat = tool_format(source, name) or FORMATS["hermes"]
        self._thinks = reasoning == "auto" and OPEN in (source or "")

    def described(self, messages: Any, tools: Sequence[dict[str, Any]] | None) -> tuple[Any, Any]:
        """The messages and the tools for the template: it is given the tools, or a system message that lists them."""
        if not tools or self._known or not isinstance(messages, list):
            return messages, tools
        text = _in_words(self.format, tools)
        first = messages[0] if messages else None
        if isinstance(first, dict) and first.get("role") in ("system", "developer"):
            if isinstance(first.get("content"), str):
                return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]], None
        return [{"role": "system", "content": text}, *messages], None

    def parser(
        self, prompt: str, tools: Sequence[dict[str, Any]] | None, choice: str, parallel: bool
    ) -> OutputParser | None:
        """A parser for one output, or None where its text is all there is.  ``choice``: see ``checked_choice``."""
        thoughts = ReasoningStream(OPEN, CLOSE, prompt.rstrip().endswith(OPEN)) if self._thinks else None
        calls = None
        if tools and choice != "none":
            calls = self.format.stream([tool["function"]["name"] for tool in tools])
        if thoughts is None and calls is None:
            return None
        return OutputParser(thoughts, calls, named=choice.startswith("="), parallel=parallel)


def _in_words(form: ToolFormat, tools: Sequence[dict[str, Any]]) -> str:
    call = json.dumps({"name": "FUNCTION", form.arguments: {"ARGUMENT": "VALUE"}})
    if form.name == "hermes":
        call = f"<tool_call>\n{call}\n</tool_call>"
    elif form.name == "mistral":
        call = f"[TOOL_CALLS] [{call}]"
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You can call functions. Their signatures:\n{listed}\n"
        f"To call one, answer with its name and arguments in just this form:\n{call}\n"
        "Otherwise answer in words."
    )


class OutputParser:
    """Owns: the text of one output that is not told yet.

    Promises: what it tells, joined, depends on the text alone; with ``parallel`` false, calls after the first are left
    out.  It is told in the order in which it was written (:meth:`parts`, :meth:`rest`), or as OpenAI's chats have it
    (:meth:`feed`, :meth:`finish`): a call's first delta has its id and name, the later ones more of its arguments.
    """

    def __init__(
        self, thoughts: ReasoningStream | None, calls: ToolStream | None, *, named: bool, parallel: bool
    ) -> None:
        self._thoughts = thoughts
        self._calls = calls
        self._named = named
        self._parallel = parallel
        self._count = 0

    @property
    def thinking(self) -> bool:
        """Whether what has come so far ends within thoughts."""
        return self._thoughts is not None and self._thoughts.inside

    def parts(self, text: str) -> list[Part]:
        reasoning = ""
        if self._thoughts is not None:
            reasoning, text = self._thoughts.feed(text)
        return self._in_order(reasoning, self._pieces(text))

    def rest(self) -> list[Part]:
        """What was held back, when no more text comes."""
        reasoning, text = self._thoughts.finish() if self._thoughts is not None else ("", "")
        pieces = self._pieces(text)
        if self._calls is not None:
            pieces += self._calls.finish()
        return self._in_order(reasoning, pieces)

    def feed(self, text: str) -> Parsed:
        return self._told(self.parts(text))

    def finish(self) -> Parsed:
        return self._told(self.rest())

    def reason(self, reason: str) -> str:
        """The finish reason as OpenAI has it: "tool_calls" if the model chose to call something."""
        return "tool_calls" if reason == "stop" and self._count and not self._named else reason

    def _pieces(self, text: str) -> list[Piece]:
        if not text:
            return []
        return [TextPiece(text)] if self._calls is None else self._calls.feed(text)

    def _in_order(self, reasoning: str, pieces: Sequence[Piece]) -> list[Part]:
        parts: list[Part] = [Thought(reasoning)] if reasoning else []
        for piece in pieces:
            if not isinstance(piece, TextPiece) and piece.index and not self._parallel:
                continue
            self._count += isinstance(piece, CallStart)
            parts.append(piece)
        return parts

    @staticmethod
    def _told(parts: Sequence[Part]) -> Parsed:
        content = reasoning = ""
        calls: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, Thought):
                reasoning += part.text
            elif isinstance(part, TextPiece):
                content += part.text
            elif isinstance(part, CallStart):
                function: dict[str, Any] = {"name": part.name, "arguments": ""}
                calls.append({"index": part.index, "id": fresh_call(), "type": "function", "function": function})
            elif calls and calls[-1]["index"] == part.index:
                # One delta a call: clients take the first chunk's list as it is, and a second entry for another call.
                calls[-1]["function"]["arguments"] += part.text
            else:
                calls.append({"index": part.index, "function": {"arguments": part.text}})
        return Parsed(content, reasoning, tuple(calls))


def fresh_call() -> str:
    """An id for a call, as clients send it back with the result."""
    return f"call_{secrets.token_hex(12)}"
