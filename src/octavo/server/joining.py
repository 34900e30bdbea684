"""A stream's chunks joined into the plain answer that they are the pieces of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.server.answers import join_calls

Body = dict[str, Any]
Joiner = Callable[[list[Body]], Body]

_GROWING = ("text", "content", "reasoning_content", "arguments")  # texts that come in pieces


def completion(chunks: list[Body]) -> Body:
    """Of /v1/completions."""
    return _whole(chunks, {})


def chat(chunks: list[Body]) -> Body:
    """Of /v1/chat/completions."""
    whole = _whole(chunks, {"object": "chat.completion"})
    for choice in whole["choices"]:
        message = choice.pop("delta")
        calls = join_calls(message.pop("tool_calls", None) or [])
        choice["message"] = {"refusal": None, **message, "content": message.get("content") or (None if calls else "")}
        if calls:
            choice["message"]["tool_calls"] = list(calls)
    return whole


def response(events: list[Body]) -> Body:
    """Of /v1/responses: the last event has it whole."""
    whole: Body = [event["response"] for event in events if "response" in event][-1]
    return whole


# What can be recorded and replayed, and how its streams are joined.
JOINERS: dict[str, Joiner] = {
    "/v1/completions": completion,
    "/v1/chat/completions": chat,
    "/v1/responses": response,
}


def _whole(chunks: list[Body], head: Body) -> Body:
    whole: Body = {}
    choices: dict[int, Body] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            index = choice["index"]
            choices[index] = _grown(choices.get(index, {}), choice)
        whole |= {name: value for name, value in chunk.items() if name != "choices" and value is not None}
    return {**whole, **head, "choices": [choices[index] for index in sorted(choices)]}


def _grown(old: Any, new: Any, name: str = "") -> Any:
    """Texts and lists are continued, objects field by field; of anything else the last that is not null holds."""
    if old is None or new is None:
        return old if new is None else new
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: _grown(old.get(key), value, key) for key, value in new.items()}}
    if isinstance(old, list) and isinstance(new, list):
        return old + new
    return old + new if name in _GROWING and isinstance(old, str) and isinstance(new, str) else new
