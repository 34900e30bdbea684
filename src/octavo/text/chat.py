"""Chat templates: messages in, the prompt that the model was trained on out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from octavo.errors import ModelError, RequestError

if TYPE_CHECKING:
    from jinja2 import Template, nodes

_NO_TEMPLATE = (
    "The model has no chat template, and a guess would give worse answers without saying so; send a plain prompt, or "
    "use an instruction-tuned model."
)


class ChatTemplate:
    """Owns a model's chat templates: the default one, and perhaps one for tools.

    Promises: the text that Hugging Face's ``apply_chat_template`` gives for the same input.  The template may hold the
    BOS token itself, so encode the text with ``add_special=False``, as Hugging Face does: one BOS at most.  A template
    that refuses the messages, fails, loops, or reaches for files ends with a ``RequestError`` that quotes it; it
    runs in a sandbox with bounded steps and text.
    """

    def __init__(
        self,
        source: str | Mapping[str, str] | None,
        bos: str | None = None,
        eos: str | None = None,
        specials: Mapping[str, str] | None = None,
    ) -> None:
        """``source``: the template, or several by name ("default", "tool_use").  ``specials``: more of the names that
        templates know, such as ``pad_token``."""
        self._sources = {"default": source} if isinstance(source, str) else dict(source or {})
        self._specials = {name: text for name, text in (specials or {}).items() if text is not None}
        for name, text in (("bos_token", bos), ("eos_token", eos)):
            if text is not None:
                self._specials[name] = text
        self._loaded: dict[str, tuple[Template, bool]] = {}

    @property
    def source(self) -> str | None:
        return self._sources.get("default")

    @property
    def takes_tools(self) -> bool:
        """Whether the model has a template that says anything of tools."""
        return "tool_use" in self._sources or re.search(r"\btools\b", self.source or "") is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for ``messages``: dicts with a role and a content (text, or a list of text parts).

        ``tools`` are described as in OpenAI's API; a template that knows nothing of tools leaves them out
        (:attr:`takes_tools`).  An earlier call's arguments may be JSON text, as that API has them, or an object, as
        templates have them.  ``kwargs`` are handed to the template (``enable_thinking`` and the like).

        Raises ``RequestError`` for messages or tools that are malformed or that the template refuses, in its own
        words, and where the model has no template; ``ModelError`` for a template that cannot be read.
        """
        template, takes_parts = self._template("tool_use" if tools and "tool_use" in self._sources else "default")
        if "messages" in kwargs:
            raise RequestError("chat_template_kwargs may not set 'messages'.", field="chat_template_kwargs")
        variables = {
            "documents": None,
            **self._specials,
            **kwargs,
            "messages": [_message(i, message, takes_parts) for i, message in enumerate(_listed(messages))],
            "tools": None if tools is None else _tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        return self._run(template, variables)

    def _run(self, template: Template, variables: Mapping[str, Any]) -> str:
        from jinja2.exceptions import SecurityError, TemplateError, UndefinedError

        from octavo.text import sandbox

        try:
            return sandbox.render(template, variables)
        except RecursionError:
            raise _failed("was stopped: it calls itself too often") from None
        except SecurityError as error:
            raise _failed(f"was stopped: {error}") from None
        except UndefinedError as error:
            raise _failed(f"failed: {error}") from None
        except TemplateError as error:  # raise_exception of the template: its own words are what the user needs
            raise _failed(f"refuses these messages: {error}") from None
        except Exception as error:
            raise _failed(f"failed: {error or type(error).__name__}") from None

    def _template(self, name: str) -> tuple[Template, bool]:
        if name not in self._sources:
            raise RequestError(_NO_TEMPLATE, field="messages")
        if name not in self._loaded:
            from jinja2.exceptions import TemplateError

            try:
                template, tree = self._environment.load(self._sources[name])
            except (TemplateError, RecursionError) as error:
                raise ModelError(f"The model's chat template {name!r} cannot be read: {error}.") from None
            self._loaded[name] = (template, _takes_parts(tree))
        return self._loaded[name]

    @cached_property
    def _environment(self) -> Any:
        from octavo.text.sandbox import BoundedEnvironment  # jinja2 only once there is a chat

        return BoundedEnvironment()


def _failed(how: str) -> RequestError:
    return RequestError(f"The model's chat template {how}", field="messages")


def _listed(messages: Any) -> Sequence[Any]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError("messages must be a list of dicts with a role and a content.", field="messages")
    if not messages:
        raise RequestError("messages is empty; give at least one message.", field="messages")
    return messages


def _tools(tools: Any) -> list[dict[str, Any]]:
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise RequestError("tools must be a list of objects that describe functions.", field="tools")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RequestError(f"tools[{index}] must be an object, not {type(tool).__name__}.", field=f"tools[{index}]")
    return [dict(tool) for tool in tools]


def _calls(where: str, calls: Any) -> list[Any]:
    """Earlier calls as templates expect them: arguments that are the JSON text of an object become the object."""
    if isinstance(calls, (str, bytes, Mapping)) or not isinstance(calls, Sequence):
        raise RequestError(f"{where} must be a list of calls.", field=where)
    out = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"])
            except (ValueError, RecursionError):
                arguments = None
            if isinstance(arguments, dict):
                call = {**call, "function": {**function, "arguments": arguments}}
        out.append(call)
    return out


def _message(index: int, message: Any, takes_parts: bool) -> dict[str, Any]:
    """One message as templates expect it: keys with None left out, text parts joined unless the template joins them."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be a dict with a role and a content, not {type(message).__name__}.", where)
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise RequestError(f"{where} needs a role, such as 'user'.", field=f"{where}.role")
    out = {key: value for key, value in message.items() if value is not None}
    if "tool_calls" in out:
        out["tool_calls"] = _calls(f"{where}.tool_calls", out["tool_calls"])
    content = out.get("content")
    if content is None:
        if out["role"] != "assistant":
            raise RequestError(f"{where} needs a content.", field=f"{where}.content")
    elif isinstance(content, (list, tuple)):
        parts = [_part(f"{where}.content[{i}]", part) for i, part in enumerate(content)]
        out["content"] = parts if takes_parts else "\n".join(part["text"] for part in parts)
    elif not isinstance(content, str):
        raise RequestError(f"{where}.content must be text or a list of text parts.", field=f"{where}.content")
    return out


def _part(where: str, part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise RequestError(f"{where} is of type {kind!r}; only text parts are supported.", field=where)
    return dict(part)


def _takes_parts(tree: nodes.Template) -> bool:
    """Whether the template itself handles a content that is a list: it tests what content is, or loops over it."""
    from jinja2 import nodes

    def is_content(node: nodes.Node) -> bool:
        if isinstance(node, nodes.Name):
            return node.name == "content"
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"

    tests = tree.find_all(nodes.Test)
    if any(test.name in {"string", "iterable", "sequence", "mapping"} and is_content(test.node) for test in tests):
        return True
    return any(is_content(loop.iter) for loop in tree.find_all(nodes.For))
