"""Messages as clients send them, made into what chat templates expect."""

from __future__ import annotations

from typing import Any

from octavo.engine.intake import checked_options
from octavo.errors import RequestError
from octavo.text.chat import ChatTemplate


def rendered(
    template: ChatTemplate,
    messages: Any,
    *,
    tools: list[dict[str, Any]] | None = None,
    options: Any = None,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt for a conversation; raises RequestError, with the template's own words where it refuses."""
    options = checked_options(options)
    options.setdefault("add_generation_prompt", add_generation_prompt)
    talk = [_system(m) for m in messages] if isinstance(messages, list) else messages
    return template.render(talk, tools=tools, **options)


def _system(message: Any) -> Any:
    """OpenAI's newer name for the system's role, as models know it."""
    developer = isinstance(message, dict) and message.get("role") == "developer"
    return {**message, "role": "system"} if developer else message


def checked_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Functions with a name; None if there are none.  Raises RequestError."""
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise RequestError("tools must be a list of functions", "tools")
    if len(tools) > 128:
        raise RequestError(f"tools holds {len(tools)} functions, at most 128 are allowed", "tools")
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise RequestError(f'tools[{i}].type must be "function"', f"tools[{i}].type")
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise RequestError(f"tools[{i}].function needs a name", f"tools[{i}].function.name")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise RequestError(
                f"tools[{i}].function.parameters must be a JSON schema", f"tools[{i}].function.parameters"
            )
    return tools


def checked_choice(choice: Any, tools: list[dict[str, Any]] | None) -> str:
    """ "none", "auto", "required", or "=NAME" for one function.  Raises RequestError."""
    if choice is None:
        return "auto" if tools else "none"
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise RequestError('tool_choice must be "none", "auto", "required" or a function', "tool_choice")
        if choice == "required" and not tools:
            raise RequestError('tool_choice "required" needs tools', "tool_choice")
        return choice if tools else "none"
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError("tool_choice needs the name of a function", "tool_choice")
    if name not in [tool["function"]["name"] for tool in tools or ()]:
        raise RequestError(f"tool_choice: there is no function {name!r} among the tools", "tool_choice")
    return "=" + name
