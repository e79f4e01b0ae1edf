"""Tool calls: what makes a model write one, and how it is found in what it wrote.

A call is a JSON object with `name` and `arguments` (or `parameters`), alone, in a list, or between `<tool_call>` and
`</tool_call>`: what models of the Llama, Qwen and Hermes families are trained to write.
"""

import json
import re
import uuid
from typing import Any

from redrafter.serve.protocol import ChatRequest, Tool, ToolChoice

__all__ = ["described", "found_calls", "schema_of", "templated"]

_MARKED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


def templated(tools: list[Tool]) -> list[dict[str, Any]]:
    """As chat templates read them."""
    return [
        {"type": tool.type, "function": {name: value for name, value in tool.function if value is not None}}
        for tool in tools
    ]


def described(tools: list[dict[str, Any]], several: bool = True) -> str:
    """Describe tools to a model whose chat template has no place for them. several: whether it may call more than one
    at a time."""
    lines = (json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        "These functions may be called:\n" + "\n".join(lines) + "\nTo call one, answer with a JSON object of its "
        '"name" and its "arguments", and nothing else.' + ("" if several else " Call no more than one at a time.")
    )


def schema_of(request: ChatRequest) -> dict[str, Any] | None:
    """The schema of the call that the text must be; None where it need not be one."""
    choice = request.tool_choice
    if not request.tools or choice in (None, "auto", "none"):
        return None
    named = choice.function.name if isinstance(choice, ToolChoice) else None
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "arguments": tool.function.parameters or _ANY},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in request.tools
        if named in (None, tool.function.name)
    ]
    return {"anyOf": calls} if calls else None


_ANY = {"type": "object"}


def found_calls(text: str, tools: list[Tool]) -> tuple[str, list[dict[str, Any]]]:
    """The text that is no call, and the calls of known tools, as OpenAI has them."""
    names = {tool.function.name for tool in tools}
    pieces = _MARKED.findall(text)
    rest = _MARKED.sub("", text).strip() if pieces else ""
    calls: list[dict[str, Any]] = []
    for piece in pieces or [text]:
        for call in _objects(piece):
            if call.get("name") not in names:
                return text, []
            arguments = call.get("arguments", call.get("parameters", {}))
            function = {"name": call["name"], "arguments": _sendable(json.dumps(arguments, ensure_ascii=False))}
            calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
    return (rest, calls) if calls else (text, [])


def _sendable(text: str) -> str:
    r"""With halves of characters, which a model may write as "\ud800", escaped as it wrote them."""
    return text.encode(errors="backslashreplace").decode()


def _objects(text: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    found = found if isinstance(found, list) else [found]
    return found if all(isinstance(each, dict) and "name" in each for each in found) else []
