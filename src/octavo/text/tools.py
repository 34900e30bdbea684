"""Tool calls in the model's own way of writing them.

- ``hermes`` (Hermes, Qwen 2.5 and 3): ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, once a call
- ``llama3``: ``{"name": ..., "parameters": {...}}``, several separated by semicolons, perhaps after
  ``<|python_tag|>``
- ``mistral``: ``[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]``, and newer ``[TOOL_CALLS]name[ARGS]{...}``
- ``gemma``, as Google's guide to function calling with Gemma 3 has it: JSON with ``name`` and ``parameters``, bare or
  in a block of code, or ``[name(key=value)]`` in Python's syntax
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.core.guide import Guide
from octavo.errors import ConfigError, RequestError
from octavo.text import jsoncalls, pythoncalls
from octavo.text.toolcalls import CallArguments, CallStart, Piece, Section, TextPiece, ToolStream, fenced

__all__ = [
    "FORMATS",
    "CallArguments",
    "CallStart",
    "Piece",
    "TextPiece",
    "ToolFormat",
    "ToolStream",
    "tool_format",
]

MOST_CALLS = 16  # that a grammar lets an output have

Reader = Callable[[ToolStream], Section]


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes tool calls.

    Owns: what starts a call, and the form of one.  ``special``: whether its marks may be special tokens, so that the
    text must be made with ``skip_special_tokens=False`` to show them.
    """

    name: str
    arguments: str  # the key of a call's arguments
    special: bool
    marks: Mapping[str, Reader] = field(repr=False)
    openers: Mapping[str, Reader] = field(repr=False)
    recognise: Callable[[str], bool] = field(repr=False)

    def stream(self, names: Collection[str] | None = None) -> ToolStream:
        """A reader for one output; with ``names``, calls of other tools than these are text."""
        return ToolStream(dict(self.marks), dict(self.openers), names)

    def grammar(self, tools: Sequence[Mapping[str, Any]], which: str | None = None) -> Guide | None:
        """A guide that makes the output one call of tool ``which``, or one call or more of any; None without tools.

        ``tools`` are as in OpenAI's API: ``{"type": "function", "function": {"name", "parameters"}}``.  Raises
        RequestError for a tool that is malformed or not there.
        """
        forms = [self._form(*_described(i, tool)) for i, tool in enumerate(tools)]
        if which is not None:
            forms = [form for form in forms if form["properties"]["name"]["const"] == which]
            if not forms:
                raise RequestError(f"tool_choice: there is no tool {which!r}", "tool_choice")
        if not forms:
            return None
        call: dict[str, Any] = forms[0] if len(forms) == 1 else {"anyOf": forms}
        most = 1 if which is not None else MOST_CALLS
        if self.name == "hermes":
            schema = json.dumps({**call, **_SPACED}, ensure_ascii=False)
            more = f' ("\\n" call){{0,{most - 1}}}' if most > 1 else ""
            return Guide.lark(
                f'start: call{more}\ncall: "<tool_call>\\n" form "\\n</tool_call>"\nform: %json {schema}\n'
            )
        if self.name == "mistral":
            call = {"type": "array", "items": call, "minItems": 1, "maxItems": most}
        return Guide.json({**call, **_SPACED})

    def _form(self, name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"name": {"const": name}, self.arguments: parameters},
            "required": ["name", self.arguments],
            "additionalProperties": False,
        }


# Models are trained on calls with a space after each colon and comma, and nothing more.
_SPACED = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}


def _described(index: int, tool: Any) -> tuple[str, Mapping[str, Any]]:
    where = f"tools[{index}]"
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(f"{where} must be of type function, with a function", where)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.function needs a name", f"{where}.function.name")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise RequestError(f"{where}.function.parameters must be a JSON schema", f"{where}.function.parameters")
    return name, {"type": "object", **parameters}


def _hermes(template: str) -> bool:
    # Some templates put other things than JSON between the same marks.
    return "<tool_call>" in template and not any(other in template for other in ("<function=", "<arg_key>"))


FORMATS = {
    form.name: form
    for form in (
        ToolFormat("hermes", "arguments", True, {"<tool_call>": jsoncalls.tagged("</tool_call>")}, {}, _hermes),
        ToolFormat(
            "mistral",
            "arguments",
            True,
            {"[TOOL_CALLS]": jsoncalls.json_list(marked=True, named=True)},
            {"[": jsoncalls.json_list(marked=False)},
            lambda template: "[TOOL_CALLS]" in template,
        ),
        ToolFormat(
            "llama3",
            "parameters",
            True,
            {"<|python_tag|>": jsoncalls.json_calls(marked=True)},
            {"{": jsoncalls.json_calls(marked=False)},
            lambda template: "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template),
        ),
        ToolFormat(
            "gemma",
            "parameters",
            False,
            {
                "```json": fenced(jsoncalls.json_list(marked=False)),
                "```tool_code": pythoncalls.python_block,
            },
            {"{": jsoncalls.json_list(marked=False), "[": pythoncalls.json_or_python_list},
            lambda template: "<start_of_turn>" in template and "<start_function_call>" not in template,
        ),
    )
}


def tool_format(template: str | None, name: str | None = None) -> ToolFormat | None:
    """The format of that name, or the one that a chat template's source shows; None if it shows none that is known.

    Raises ConfigError for a name that there is not.
    """
    if name is not None:
        if name not in FORMATS:
            raise ConfigError(f"tool_format must be one of {', '.join(FORMATS)}, not {name!r}", "tool_format")
        return FORMATS[name]
    return next((form for form in FORMATS.values() if form.recognise(template or "")), None)
