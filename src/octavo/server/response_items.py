"""The items of a response's input, made into the messages of a conversation.

A message of ours may come back as several items: thoughts, text and calls that stand in a row become one message again,
as chat templates want them.
"""

from __future__ import annotations

from typing import Any

from octavo.errors import RequestError

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text")


def messages(given: Any, instructions: str | None = None) -> list[dict[str, Any]]:
    """The conversation of an ``input``, a text or a list of items.  Raises RequestError that names the item's field."""
    if isinstance(given, str):
        talk = [{"role": "user", "content": given}]
    elif isinstance(given, list):
        if not given:
            raise RequestError("input is empty: give a text or at least one item", "input")
        conversation = Conversation()
        for i, item in enumerate(given):
            conversation.add(f"input[{i}]", item)
        talk = conversation.messages
    else:
        raise RequestError("input must be text or a list of items", "input")
    return talk if instructions is None else _instructed(talk, instructions)


class Conversation:
    """Owns: the messages that the items so far make.

    Promises: what the assistant thought, said and called in a row is one message, but texts that follow each other are
    messages of their own; a result names the function whose call it answers, where that is known.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}  # of functions, by the call's id
        self._own: dict[str, Any] | None = None  # the assistant's message, while more may join it

    def add(self, where: str, item: Any) -> None:
        if not isinstance(item, dict):
            raise RequestError(f"{where} must be an object", where)
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            self._message(where, item)
        elif kind == "reasoning":
            self._reasoning(where, item)
        elif kind == "function_call":
            self._call(where, item)
        elif kind == "function_call_output":
            self._result(where, item)
        elif kind == "item_reference":
            raise RequestError(f"{where}: nothing is stored here, so send the item itself", where, "unsupported_value")
        else:
            message = f"{where}.type: {kind!r} is not supported; messages, function calls and their outputs are"
            raise RequestError(message, f"{where}.type", "unsupported_value")

    def _message(self, where: str, item: dict[str, Any]) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise RequestError(f"{where}.role must be one of {', '.join(_ROLES)}, not {role!r}", f"{where}.role")
        content = _content(f"{where}.content", item.get("content"))
        if role != "assistant":
            self._own = None
            self.messages.append({"role": role, "content": content})
            return
        text = _joined(content)
        own = self._own
        if own is None or (own["content"] is not None and "tool_calls" not in own):
            own = self._begin()
        own["content"] = (own["content"] or "") + text

    def _reasoning(self, where: str, item: dict[str, Any]) -> None:
        text = ""
        for name in ("content", "summary"):  # thoughts themselves, if they are there
            if not text and item.get(name):
                text = _joined(_content(f"{where}.{name}", item[name], ("reasoning_text", "summary_text")))
        if not text:  # encrypted somewhere else, and of no use here
            return
        own = self._own
        if own is None or own["content"] is not None or "tool_calls" in own:
            own = self._begin()
        own["reasoning_content"] = own.get("reasoning_content", "") + text

    def _call(self, where: str, item: dict[str, Any]) -> None:
        id, name, arguments = (_text(where, item, key) for key in ("call_id", "name", "arguments"))
        self._names[id] = name
        own = self._own if self._own is not None else self._begin()
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        own.setdefault("tool_calls", []).append(call)

    def _result(self, where: str, item: dict[str, Any]) -> None:
        self._own = None
        id = _text(where, item, "call_id")
        message = {"role": "tool", "tool_call_id": id, "content": _content(f"{where}.output", item.get("output"))}
        if id in self._names:
            message["name"] = self._names[id]
        self.messages.append(message)

    def _begin(self) -> dict[str, Any]:
        self._own = {"role": "assistant", "content": None}
        self.messages.append(self._own)
        return self._own


def _instructed(talk: list[dict[str, Any]], instructions: str) -> list[dict[str, Any]]:
    """With instructions first; one system message, since many templates take no more."""
    first, *rest = talk
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": instructions}, *talk]
    content = first["content"]
    if isinstance(content, str):
        return [{**first, "content": f"{instructions}\n\n{content}"}, *rest]
    return [{**first, "content": [{"type": "text", "text": instructions}, *content]}, *rest]


def _content(where: str, content: Any, kinds: tuple[str, ...] = _TEXTS) -> str | list[dict[str, Any]]:
    """Text, or text parts as templates know them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be text or a list of text parts", where)
    parts = []
    for i, part in enumerate(content):
        here = f"{where}[{i}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind not in (*kinds, "refusal"):
            message = f"{here}.type: {kind!r} is not supported; only text is"
            raise RequestError(message, f"{here}.type", "unsupported_value")
        key = "refusal" if kind == "refusal" else "text"
        text = part.get(key)
        if not isinstance(text, str):
            raise RequestError(f"{here}.{key} must be a text", f"{here}.{key}")
        parts.append({"type": "text", "text": text})
    return parts


def _joined(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _text(where: str, item: dict[str, Any], key: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or (not value and key != "arguments"):
        raise RequestError(f"{where}.{key} must be a text", f"{where}.{key}")
    return value
