"""Describe tools to the model, and select the tools that a grammar has to enforce."""

from redrafter.serve.answers.lark import CalledTool
from redrafter.serve.protocol.requests import ChatRequest, ToolChoice


def forced_tools(request: ChatRequest) -> list[CalledTool]:
    """Return the tools that a forced call may use; empty if `tool_choice` forces no call."""
    choice = request.tool_choice
    if choice in (None, "auto", "none"):
        return []
    named = choice.function.name if isinstance(choice, ToolChoice) else None
    functions = [tool.function for tool in request.tools or () if named in (None, tool.function.name)]
    return [CalledTool(function.name, function.parameters or {"type": "object"}) for function in functions]


def strict_tools(request: ChatRequest) -> list[CalledTool]:
    """Return the callable tools if any is strict, else none; tools that are not strict accept any arguments."""
    functions = [tool.function for tool in request.callable_tools]
    if request.tool_choice not in (None, "auto") or not any(function.strict for function in functions):
        return []
    anything = {"type": "object"}
    return [CalledTool(each.name, (each.strict and each.parameters) or anything) for each in functions]
