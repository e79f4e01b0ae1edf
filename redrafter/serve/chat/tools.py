"""Describe tools to a model, and collect the calls that it writes."""

import json
from typing import Any

from redrafter.serve.chat.reader import Call, Event, Fragment
from redrafter.serve.protocol.messages import Tool

__all__ = ["collect_calls", "describe_tools", "template_tools"]


def template_tools(tools: list[Tool]) -> list[dict[str, Any]]:
    """Return tools as chat templates read them, without fields that are null."""
    return [
        {"type": tool.type, "function": {name: value for name, value in tool.function if value is not None}}
        for tool in tools
    ]


def describe_tools(tools: list[dict[str, Any]], parallel_calls: bool = True) -> str:
    """Return a system message that describes tools to a model whose chat template ignores them.

    Args:
        tools: Tools as `template_tools` returns them.
        parallel_calls: Whether the model may call more than one tool at a time.
    """
    lines = (json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    one_call = "" if parallel_calls else " Call no more than one at a time."
    return (
        "These functions may be called:\n" + "\n".join(lines) + "\nTo call one, answer with a JSON object of its "
        f'"name" and its "arguments", and nothing else.{one_call}'
    )


def collect_calls(events: list[Event]) -> list[dict[str, Any]]:
    """Return the calls among all events of a text, in OpenAI's format."""
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, Call):
            function = {"name": event.name, "arguments": ""}
            calls.append({"id": event.id, "type": "function", "function": function})
        elif isinstance(event, Fragment):
            calls[event.number]["function"]["arguments"] += event.text
    return calls
