"""A form that an output must have: plain data, compiled by :mod:`octavo.text.guides`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import RequestError

KINDS = ("json_object", "json_schema", "regex", "choice", "grammar")
MAX_BYTES = 256 << 10  # of a schema, expression or grammar
MAX_CHOICES = 1000


@dataclass(frozen=True)
class Guide:
    """What an output must look like, from its first character to its last; make one with the class methods.

    ``value`` is a text, so that a guide can be compared, hashed and shipped: a JSON schema, a regular expression, a
    Lark grammar, a JSON list of choices, or nothing for any JSON object.
    """

    kind: str
    value: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RequestError(f"guide: kind must be one of {', '.join(KINDS)}, not {self.kind!r}", "guide")
        if not isinstance(self.value, str):
            raise RequestError(f"guide: {self.kind} must be a text, not {type(self.value).__name__}", "guide")
        size = len(self.value.encode("utf-8", "surrogatepass"))
        if size > MAX_BYTES:
            raise RequestError(f"guide: {self.kind} has {size} bytes, at most {MAX_BYTES} are allowed", "guide")
        if self.kind in ("regex", "grammar") and not self.value:
            raise RequestError(f"guide: {self.kind} must not be empty", "guide")

    @classmethod
    def json(cls, schema: Any = None) -> Guide:
        """JSON by a schema (a mapping, JSON text, or a pydantic model class); without one, any JSON object."""
        if schema is None:
            return cls("json_object")
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if isinstance(schema, str):
            return cls("json_schema", schema)
        if not isinstance(schema, (Mapping, bool)):
            kind = type(schema).__name__
            raise RequestError(f"guide: a JSON schema must be a mapping or JSON text, not {kind}", "guide")
        try:  # the order of keys is the order of properties in the output
            return cls("json_schema", json.dumps(schema, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"guide: the JSON schema is no JSON: {error}", "guide") from None

    @classmethod
    def regex(cls, pattern: str) -> Guide:
        """The whole output matches a regular expression (Rust's syntax, without look-around and references)."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Guide:
        """The output is one of the texts, in the tokens that the model's tokenizer would write it with."""
        if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
            raise RequestError("guide: choices must be a list of texts that is not empty", "guide")
        if any(not isinstance(text, str) or not text for text in choices):
            raise RequestError("guide: each choice must be a text that is not empty", "guide")
        if len(choices) > MAX_CHOICES:
            raise RequestError(f"guide: {len(choices)} choices, at most {MAX_CHOICES} are allowed", "guide")
        return cls("choice", json.dumps(list(choices), ensure_ascii=False))

    @classmethod
    def lark(cls, grammar: str) -> Guide:
        """The output is what the rule ``start`` of a Lark grammar derives (llguidance's dialect)."""
        return cls("grammar", grammar)
