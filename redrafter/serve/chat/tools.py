"""What a model is told of tools, and the calls that a whole text holds."""

import json
from typing import Any

from redrafter.serve.chat.reader import Call, Event, Fragment
from redrafter.serve.protocol.requests import Tool

__all__ = ["called", "described", "templated"]


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


def called(events: list[Event]) -> list[dict[str, Any]]:
    """Return whole calls, as OpenAI has them."""
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, Call):
            function = {"name": event.name, "arguments": ""}
            calls.append({"id": event.id, "type": "function", "function": function})
        elif isinstance(event, Fragment):
            calls[event.number]["function"]["arguments"] += event.text
    return calls
