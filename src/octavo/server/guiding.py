"""Which form an answer must have: OpenAI's ``response_format``, and vLLM's extra fields."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from octavo.core.guide import Guide
from octavo.errors import RequestError
from octavo.server.schema import ChatBody, CompletionBody, Generating

_EXTRA: dict[str, Callable[[Any], Guide]] = {
    "guided_json": Guide.json,
    "guided_regex": Guide.regex,
    "guided_choice": Guide.choice,
    "guided_grammar": Guide.lark,
}
_INSIDE: dict[str, Callable[[Any], Guide]] = {
    "json": Guide.json,
    "regex": Guide.regex,
    "choice": Guide.choice,
    "grammar": Guide.lark,
}


def guide_of(body: Generating) -> tuple[str, Guide | None]:
    """The form that the answer must have, and the field that says so; raises RequestError also if there are two."""
    found: dict[str, Guide] = {}
    for name, make in _EXTRA.items():
        value = getattr(body, name)
        if value is not None:
            found[name] = _made(name, make, value)
    if body.structured_outputs is not None:
        found["structured_outputs"] = _structured(body.structured_outputs)
    if isinstance(body, (ChatBody, CompletionBody)) and body.response_format is not None:
        guide = response_format(body.response_format)
        if guide is not None:
            found["response_format"] = guide
    if len(found) > 1:
        names = list(found)
        raise RequestError(f"{names[1]}: only one of {' and '.join(names)} can say the form of an answer", names[1])
    return next(iter(found.items()), ("guide", None))


def response_format(value: Any, field: str = "response_format") -> Guide | None:
    """Of {"type": "text" | "json_object" | "json_schema"}."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Guide.json()
    if kind != "json_schema":
        raise RequestError(f"{field}.type must be text, json_object or json_schema, not {kind!r}", f"{field}.type")
    inner = value.get("json_schema", value)  # the newer interface has the schema one level up
    where = field if "schema" in value else f"{field}.json_schema"
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, (dict, bool)):
        raise RequestError(f"{where}.schema must be a JSON schema", f"{where}.schema")
    return _made(where, Guide.json, schema)


def _structured(value: Any) -> Guide:
    if not isinstance(value, dict):
        raise RequestError("structured_outputs must be an object", "structured_outputs")
    given = {name: inner for name, inner in value.items() if inner is not None and inner is not False}
    if len(given) != 1:
        names = ", ".join((*_INSIDE, "json_object"))
        raise RequestError(f"structured_outputs must have one of {names}", "structured_outputs")
    name, inner = next(iter(given.items()))
    if name == "json_object":
        return Guide.json()
    if name not in _INSIDE:
        raise RequestError(f"structured_outputs.{name} is not known", f"structured_outputs.{name}")
    return _made(f"structured_outputs.{name}", _INSIDE[name], inner)


def _made(field: str, make: Callable[[Any], Guide], value: Any) -> Guide:
    if make == Guide.json and isinstance(value, str):
        try:
            json.loads(value)
        except ValueError as error:
            raise RequestError(f"{field} is no valid JSON: {error}", field) from None
    try:
        return make(value)
    except RequestError as error:
        raise RequestError(f"{field}: {str(error).removeprefix('guide: ')}", field) from None
