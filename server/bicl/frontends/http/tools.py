"""Tool calls as TGI makes them: a JSON schema over all tools constrains the answer.

The model answers ``{"function": {"_name": "get_weather", ...arguments}}``; ``no_tool`` as a name
means that it wants to answer in words.
"""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

from bicl.frontends.http.errors import tool_error
from bicl.frontends.http.schemas.chat import (
    FunctionCall,
    FunctionDefinition,
    Tool,
    ToolCallOut,
    TypedChoice,
)

__all__ = ["NO_TOOL", "ToolCallSplitter", "choose_tools", "parse_call", "tool_schema"]

NO_TOOL = "no_tool"
T = TypeVar("T", dict[str, Any], list[Any])


def choose_tools(tools: list[Tool], choice: str | TypedChoice | None) -> list[Tool]:
    """Tools among which the model may choose; empty if it may not call any.

    Raises:
        WireError: the chosen tool does not exist.
    """
    match choice:
        case None | "auto":
            no_tool = FunctionDefinition(
                name=NO_TOOL,
                description="Open ended response with no specific tool selected",
                arguments={"type": "object"},
            )
            return [*tools, Tool(type="function", function=no_tool)]
        case "required":
            return tools
        case "none":
            return []
    name = choice if isinstance(choice, str) else choice.function.name
    for tool in tools:
        if tool.function.name == name:
            return [tool]
    raise tool_error(f"Tool with name {name} not found")


def tool_schema(tools: list[Tool]) -> dict[str, Any]:
    """JSON schema of a call of any of ``tools``.

    Raises:
        WireError: two tools define different schemas under one name in ``$defs``.
    """
    calls: list[dict[str, Any]] = []
    shared: dict[str, Any] = {}
    for tool in tools:
        call = {
            "type": "object",
            "description": tool.function.description or "",
            "properties": {
                "_name": {"type": "string", "const": tool.function.name},
                **_part(tool, "properties", dict),
            },
            "required": ["_name", *_part(tool, "required", list)],
            "additionalProperties": False,
        }
        calls.append(call)
        # References in a tool's own schema count from the root, so its definitions move there.
        for name, definition in _part(tool, "$defs", dict).items():
            if shared.setdefault(name, definition) != definition:
                raise tool_error(f"two tools define `{name}` in $defs differently; rename one")
    schema = {
        "type": "object",
        "properties": {"function": {"anyOf": calls}},
        "required": ["function"],
        "additionalProperties": False,
    }
    return {**schema, "$defs": shared} if shared else schema


def _part(tool: Tool, keyword: str, kind: type[T]) -> T:
    """One keyword of a tool's schema of its arguments; empty where there is none."""
    schema = tool.function.arguments
    part = schema.get(keyword, kind()) if isinstance(schema, dict) else kind()
    if not isinstance(part, kind):
        name = tool.function.name
        raise tool_error(f"`{keyword}` in the parameters of tool {name} has the wrong type")
    return part


def parse_call(text: str) -> ToolCallOut | None:
    """The call in a whole answer; ``None`` if the model chose no tool.

    Raises:
        WireError: the answer is no call (it was cut off by a limit).
    """
    try:
        arguments = dict(json.loads(text)["function"])
        name = arguments.pop("_name")
    except (ValueError, KeyError, TypeError) as error:
        raise tool_error(f"Failed to parse generated text: {error} {text!r}") from None
    if name == NO_TOOL:
        return None
    body = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    function = FunctionCall(name=name, arguments=body)
    return ToolCallOut(id="0", type="function", function=function)


_HEAD = re.compile(
    r'\s*\{\s*"function"\s*:\s*\{\s*"_name"\s*:\s*("(?:[^"\\]|\\.)*")\s*(?:,\s*|(?=\}))'
)


class ToolCallSplitter:
    """Splits a streamed call into its function's name and pieces of its arguments.

    ``name`` is ``None`` until it is known. The braces that close the answer are held back, because
    the last of them belongs to the wrapper and not to the arguments.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._text = ""

    def push(self, text: str) -> str | None:
        """The next piece of the arguments, or ``None`` if this text completes none."""
        self._text += text
        start = ""
        if self.name is None:
            head = _HEAD.match(self._text)
            if head is None:
                return None
            self.name = json.loads(head[1])
            self._text = self._text[head.end() :]
            start = "{"
        piece = self._text.rstrip("} \n\t\r")
        self._text = self._text[len(piece) :]
        return start + piece or None

    def finish(self) -> str | None:
        """What was held back, without the wrapper's brace."""
        rest = self._text.rstrip()
        return rest.removesuffix("}") or None if self.name is not None else None
