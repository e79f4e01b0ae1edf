"""Select the tools that a grammar has to enforce."""

from typing import Any

from redrafter.serve.answers.lark import CalledTool
from redrafter.serve.protocol.requests import ChatRequest, ToolChoice

_COMBINING_KEYWORDS = frozenset({"$ref", "allOf", "anyOf", "oneOf", "const", "enum"})
# Keywords by which a schema without properties describes the members of an object nevertheless.
_MEMBER_KEYWORDS = _COMBINING_KEYWORDS | {"additionalProperties", "patternProperties"}


def forced_tools(request: ChatRequest) -> list[CalledTool]:
    """Return the tools that a forced call may use; empty if `tool_choice` forces no call."""
    choice = request.tool_choice
    if choice in (None, "auto", "none"):
        return []
    named = choice.function.name if isinstance(choice, ToolChoice) else None
    functions = [tool.function for tool in request.tools or () if named in (None, tool.function.name)]
    return [CalledTool(function.name, _arguments_schema(function.parameters)) for function in functions]


def strict_tools(request: ChatRequest) -> list[CalledTool]:
    """Return the callable tools if any is strict, else none; tools that are not strict accept any arguments."""
    functions = [tool.function for tool in request.callable_tools]
    if request.tool_choice not in (None, "auto") or not any(function.strict for function in functions):
        return []
    anything = {"type": "object"}
    return [
        CalledTool(each.name, _arguments_schema(each.parameters) if each.strict else anything) for each in functions
    ]


def _arguments_schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return the schema of a call's arguments, an object. A function without properties takes none, as in OpenAI's API.

    Parameters of `{"type": "object"}` alone are any object.
    """
    schema = parameters or {"properties": {}}
    if _COMBINING_KEYWORDS.isdisjoint(schema):  # else other parts of the schema have the type
        schema = schema | {"type": "object"}
    if schema.get("properties") == {} and _MEMBER_KEYWORDS.isdisjoint(schema):
        schema = schema | {"additionalProperties": False}
    return schema
