"""Describe tools to the model, and select the tools that a grammar has to enforce."""

import json
from typing import Any

from redrafter.serve.answers.lark import CalledTool
from redrafter.serve.protocol.requests import ChatRequest, Tool, ToolChoice


def template_tools(tools: list[Tool]) -> list[dict[str, Any]]:
    """Return tools as chat templates read them, without null fields."""
    return [
        {"type": tool.type, "function": {name: value for name, value in tool.function if value is not None}}
        for tool in tools
    ]


def describe_tools(tools: list[dict[str, Any]], parallel_calls: bool = True) -> str:
    """Return a system message that describes `template_tools` to a model whose chat template ignores them."""
    lines = (json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    one_call = "" if parallel_calls else " Call no more than one at a time."
    return (
        "These functions may be called:\n" + "\n".join(lines) + "\nTo call one, answer with a JSON object of its "
        f'"name" and its "arguments", and nothing else.{one_call}'
    )


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
