"""The body of a request for a response, and what it asks of the model: a conversation, as a chat has it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import WithJsonSchema

from octavo.errors import RequestError
from octavo.server.errors import ApiError, unsupported
from octavo.server.response_items import messages
from octavo.server.schema import ChatBody, Choice, Flag, Integer, Object, Objects, Sampled, Text, Texts

LOGPROBS = "message.output_text.logprobs"
# The others ask for what only tools of OpenAI's have, or for thoughts that are sent back in the open here anyway.
_INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
_ITEMS = {"type": "array", "minItems": 1, "items": {"type": "object"}}
Input = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, _ITEMS]})]


class ResponseBody(Sampled):
    """POST /v1/responses"""

    input: Input
    instructions: Text = None
    max_output_tokens: Integer = None
    max_tokens: Integer = None  # as in chats: of two limits the smaller holds
    top_logprobs: Integer = None
    include: Texts = None
    tools: Objects = None
    tool_choice: Choice = None
    parallel_tool_calls: Flag = None
    text: Object = None
    reasoning: Object = None
    metadata: Object = None
    store: Flag = None
    truncation: Text = None
    stream_options: Object = None
    chat_template_kwargs: Object = None
    # accepted, and echoed
    max_tool_calls: Integer = None
    prompt_cache_key: Text = None
    safety_identifier: Text = None
    service_tier: Text = None
    # known, and refused if they ask for something
    previous_response_id: Text = None
    conversation: Choice = None
    background: Flag = None
    prompt: Object = None
    moderation: Object = None
    context_management: Objects = None
    n: Integer = None
    max_completion_tokens: Integer = None
    response_format: Object = None
    reasoning_effort: Text = None
    logprobs: Any = None
    prompt_logprobs: Integer = None
    use_beam_search: Flag = None


_STATELESS = "is not supported: nothing is stored here, so send the whole conversation as input"
_REFUSED = {
    "previous_response_id": _STATELESS,
    "conversation": _STATELESS,
    "background": "is not supported: nothing is stored here, so an answer must be waited for",
    "prompt": "is not supported: no prompts are stored here; send instructions and input",
    "moderation": "is not supported",
    "context_management": "is not supported: a conversation that does not fit is refused, never cut",
    "max_completion_tokens": "is called max_output_tokens here",
    "response_format": "is called text.format here",
    "reasoning_effort": "is called reasoning.effort here",
    "logprobs": f"are asked for with include, as {LOGPROBS!r}",
    "prompt_logprobs": "is not supported here; /v1/completions has it",
    "use_beam_search": "is not supported here; /v1/chat/completions has it",
}


def conversation(body: ResponseBody) -> ChatBody:
    """What the body asks for, as a chat would ask for it.  Raises RequestError or ApiError, naming the field."""
    _refuse_unsupported(body)
    shared = {name: getattr(body, name) for name in Sampled.model_fields}
    logprobs = LOGPROBS in _included(body)
    if body.top_logprobs and not logprobs:
        raise RequestError(f"top_logprobs: goes with include, which must hold {LOGPROBS!r}", "top_logprobs")
    return ChatBody.model_construct(
        **shared,
        messages=messages(body.input, body.instructions),
        max_completion_tokens=body.max_output_tokens,
        max_tokens=body.max_tokens,
        logprobs=logprobs,
        top_logprobs=body.top_logprobs if logprobs else None,
        response_format=_format(body.text),
        tools=_tools(body.tools),
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=_effort(body.reasoning),
        chat_template_kwargs=body.chat_template_kwargs,
    )


def echo(body: ResponseBody) -> dict[str, Any]:
    """What a response tells of the request that it answers."""
    reasoning, text = body.reasoning or {}, body.text or {}
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "text": {**text, "format": text.get("format") or {"type": "text"}},
        "tool_choice": body.tool_choice if body.tool_choice is not None else "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "user": body.user,
    }


@contextmanager
def named_as_sent() -> Iterator[None]:
    """Errors of what responses share with chats name the fields as they are called here."""
    try:
        yield
    except RequestError as error:
        field = error.field and _renamed(error.field)
        raise RequestError(_renamed(str(error)), field, error.code) from None
    except ApiError as error:
        param = error.param and _renamed(error.param)
        raise ApiError(
            error.status, _renamed(str(error)), param=param, code=error.code, headers=error.headers
        ) from None


_NAMES = (
    (r"^messages\b", "input"),
    (r"^prompt$", "input"),
    (r"\bmax_(completion_)?tokens\b", "max_output_tokens"),
    (r"\bresponse_format\b", "text.format"),
)


def _renamed(text: str) -> str:
    for pattern, name in _NAMES:
        text = re.sub(pattern, name, text)
    return text


def _refuse_unsupported(body: ResponseBody) -> None:
    """Fields whose silent loss would change the answer."""
    for name, why in _REFUSED.items():
        if getattr(body, name):
            raise unsupported(name, why)
    if body.n not in (None, 1):
        raise unsupported("n", "is not supported: a response is one answer")
    if body.truncation not in (None, "disabled"):
        raise unsupported("truncation", 'must be "disabled": an input that does not fit is refused, never cut')
    metadata = body.metadata
    if metadata is not None:
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise RequestError("metadata must be an object whose values are texts", "metadata")


def _included(body: ResponseBody) -> list[str]:
    if body.include is None:
        return []
    if not isinstance(body.include, list):
        raise RequestError("include must be a list of names", "include")
    for i, name in enumerate(body.include):
        if name not in _INCLUDABLE:
            raise RequestError(f"include[{i}]: {name!r} is not known", f"include[{i}]")
    return body.include


def _format(text: Any) -> Any:
    """The form that the answer must have, whose schema is further out than in a chat."""
    if text is None:
        return None
    if not isinstance(text, dict):
        raise RequestError("text must be an object", "text")
    form = text.get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema" and "schema" not in form:
        raise RequestError("text.format.schema must be a JSON schema", "text.format.schema")
    return form


def _effort(reasoning: Any) -> str | None:
    if reasoning is None:
        return None
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else 0
    if effort is not None and not isinstance(effort, str):
        raise RequestError("reasoning must be an object whose effort is a text", "reasoning")
    return effort


def _tools(tools: Any) -> Any:
    """Functions as chats describe them."""
    if not isinstance(tools, list):
        return tools  # refused further in, by name
    out = []
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            raise unsupported(f"{where}.type", f"{kind!r} is not supported; only functions are")
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise RequestError(f"{where}.name: a function needs a name", f"{where}.name")
        if not isinstance(tool.get("parameters"), (dict, type(None))):
            raise RequestError(f"{where}.parameters must be a JSON schema", f"{where}.parameters")
        described = {key: tool[key] for key in ("name", "description", "parameters", "strict") if key in tool}
        function = {key: value for key, value in described.items() if value is not None}
        out.append({"type": "function", "function": function})
    return out


def _choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise unsupported("tool_choice", f"of type {choice.get('type')!r} is not supported; only functions are")
    return {"type": "function", "function": {"name": choice.get("name")}}
