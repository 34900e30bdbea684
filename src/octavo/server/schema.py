"""The bodies of requests.  Unknown fields are accepted, and their names logged; types are not converted.

What a value may be is checked where it is used (``SamplingParams``, intake, the chat template); here is only its type.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

log = logging.getLogger("octavo.server")

Text = str | None
Flag = bool | None
Number = float | None
Integer = int | None


def _loose(**schema: Any) -> Any:
    """A value whose type is checked further in; ``schema`` is what the documentation says of it."""
    return WithJsonSchema(schema)


_TOKENS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
Prompts = Annotated[
    Any, _loose(anyOf=[{"type": "string"}, _TEXTS, _TOKENS, {"type": "array", "items": _TOKENS, "minItems": 1}])
]
Prompt = Annotated[Any, _loose(anyOf=[{"type": "string"}, _TOKENS, {"type": "null"}])]
Stops = Annotated[
    Any,
    _loose(anyOf=[{"type": "string", "minLength": 1}, {**_TEXTS, "minItems": 0}, {"type": "null"}]),
]
Messages = Annotated[
    Any,
    _loose(
        type="array",
        minItems=1,
        items={
            "type": "object",
            "required": ["role"],
            "properties": {
                "role": {"type": "string"},
                "content": {
                    "anyOf": [
                        {"type": "string"},
                        {"type": "null"},
                        {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "required": ["type", "text"],
                                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                            },
                        },
                    ]
                },
            },
        },
    ),
]
Object = Annotated[Any, _loose(anyOf=[{"type": "object"}, {"type": "null"}])]
Objects = Annotated[Any, _loose(anyOf=[{"type": "array", "items": {"type": "object"}}, {"type": "null"}])]
Choice = Annotated[Any, _loose(anyOf=[{"type": "string"}, {"type": "object"}, {"type": "null"}])]
Schema = Annotated[Any, _loose(anyOf=[{"type": "object"}, {"type": "string"}, {"type": "boolean"}, {"type": "null"}])]
Early = Annotated[Any, _loose(anyOf=[{"type": "boolean"}, {"const": "never"}])]
Texts = Annotated[Any, _loose(anyOf=[{"type": "string"}, _TEXTS, {"type": "null"}])]
Tokens = Annotated[Any, _loose(anyOf=[{**_TOKENS, "minItems": 0}, {"type": "null"}])]


class Body(BaseModel):
    """A body that takes fields it does not know, and says which."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    def unknown(self) -> list[str]:
        return sorted(self.model_extra or ())

    def report_unknown(self, where: str) -> None:
        names = self.unknown()
        if names:
            log.info("%s: fields that are not known here are passed over: %s", where, ", ".join(names[:20]))


class StreamOptions(Body):
    include_usage: Flag = None


class Sampled(Body):
    """What all requests that generate text share."""

    model: Text = None
    stream: Flag = None
    temperature: Number = None
    top_p: Number = None
    seed: Integer = None
    stop: Stops = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    logit_bias: Object = None
    user: Text = None
    # beyond OpenAI's
    top_k: Integer = None
    min_p: Number = None
    repetition_penalty: Number = None
    min_tokens: Integer = None
    ignore_eos: Flag = None
    stop_token_ids: Tokens = None
    bad_words: Texts = None
    skip_special_tokens: Flag = None
    include_stop_str_in_output: Flag = None
    priority: Integer = None
    cache_salt: Text = None
    timeout: Number = Field(None, description="seconds, after which the request ends with an error")
    guided_json: Schema = None
    guided_regex: Text = None
    guided_choice: Texts = None
    guided_grammar: Text = None
    structured_outputs: Object = None


class Generating(Sampled):
    """What the older interfaces share, which may tell several answers."""

    stream_options: StreamOptions | None = None
    n: Integer = None
    max_tokens: Integer = None
    # beyond OpenAI's
    prompt_logprobs: Integer = None
    use_beam_search: Flag = None
    beam_width: Integer = None
    length_penalty: Number = None
    early_stopping: Early = None
    return_token_ids: Flag = None


class CompletionBody(Generating):
    """POST /v1/completions"""

    prompt: Prompts
    seeds: Tokens = Field(None, description="a seed for each prompt, in place of one for all")
    best_of: Integer = None
    echo: Flag = None
    logprobs: Integer = None
    suffix: Text = None
    add_special_tokens: Flag = None
    response_format: Object = None


class ChatBody(Generating):
    """POST /v1/chat/completions"""

    messages: Messages
    max_completion_tokens: Integer = None
    logprobs: Flag = None
    top_logprobs: Integer = None
    response_format: Object = None
    tools: Objects = None
    tool_choice: Choice = None
    parallel_tool_calls: Flag = None
    reasoning_effort: Text = None
    chat_template_kwargs: Object = None
    add_generation_prompt: Flag = None
    continue_final_message: Flag = None
    # known, and refused if they ask for something
    functions: Objects = None
    function_call: Choice = None
    modalities: Texts = None
    audio: Object = None
    prediction: Object = None
    web_search_options: Object = None


class ContinueBody(CompletionBody):
    """POST /v1/sessions/ID/generate"""

    prompt: Literal[None] = None


class SessionBody(Body):
    """POST /v1/sessions"""

    prompt: Prompt = None
    cache_salt: Text = None


class AppendBody(Body):
    """POST /v1/sessions/ID/append"""

    text: Prompt


class RewindBody(Body):
    """POST /v1/sessions/ID/rewind"""

    to: int


class ForkBody(Body):
    """POST /v1/sessions/ID/fork"""

    n: Integer = None


class ScoreBody(Body):
    """POST /v1/sessions/ID/score"""

    texts: Prompts


class TokenizeBody(Body):
    """POST /tokenize: a ``prompt`` or ``messages``"""

    model: Text = None
    prompt: Text = None
    messages: Annotated[Any, _loose(anyOf=[{"type": "array", "items": {"type": "object"}}, {"type": "null"}])] = None
    tools: Objects = None
    add_special_tokens: Flag = None
    add_generation_prompt: Flag = None
    chat_template_kwargs: Object = None
    return_token_strs: Flag = None


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: Text = None
    tokens: Annotated[Any, _loose(type="array", items={"type": "integer"})]
    skip_special_tokens: Flag = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "octavo"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
