"""Tools: how a model hears of them, and the JSON schema of a call that it must write."""

import json
from typing import Any

from redrafter.serve.protocol.requests import ChatRequest, Tool, ToolChoice

# Without this, a model may fill a call with spaces and line breaks until no token is left. A separator is a regular
# expression; a space after it is how models are trained to write JSON.
_COMPACT_JSON = {
    "whitespace_pattern": None,
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
# Keywords whose values are data, and keywords whose values are schemas by name.
_DATA_KEYWORDS = frozenset({"const", "enum", "default", "examples", "example"})
_NAMED_SCHEMAS_KEYWORDS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def template_tools(tools: list[Tool]) -> list[dict[str, Any]]:
    """Return tools as chat templates read them, without fields that are null."""
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


def call_schema(request: ChatRequest) -> dict[str, Any] | None:
    """Return the JSON schema of the one call that an answer must be, or None where `tool_choice` does not force one."""
    choice = request.tool_choice
    if not request.tools or choice in (None, "auto", "none"):
        return None
    named = choice.function.name if isinstance(choice, ToolChoice) else None
    functions = [tool.function for tool in request.tools if named in (None, tool.function.name)]
    definitions = {}
    for number, function in enumerate(functions):
        schema = function.parameters or {"type": "object"}
        alone = {name: value for name, value in schema.items() if name not in ("$id", "$schema", "x-guidance")}
        definitions[str(number)] = _move_references(alone, f"#/$defs/{number}")
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function.name}, "arguments": {"$ref": f"#/$defs/{number}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for number, function in enumerate(functions)
    ]
    return {"x-guidance": _COMPACT_JSON, "anyOf": calls, "$defs": definitions}


def _move_references(value: Any, path: str) -> Any:
    """Return a value of a schema with `path` put before its references within the schema."""
    if isinstance(value, list):
        return [_move_references(entry, path) for entry in value]
    if not isinstance(value, dict):
        return value
    moved: dict[str, Any] = {}
    for keyword, content in value.items():
        if keyword == "$ref" and isinstance(content, str) and (content == "#" or content.startswith("#/")):
            moved[keyword] = path + content[1:]
        elif keyword in _NAMED_SCHEMAS_KEYWORDS and isinstance(content, dict):
            moved[keyword] = {name: _move_references(schema, path) for name, schema in content.items()}
        else:
            moved[keyword] = content if keyword in _DATA_KEYWORDS else _move_references(content, path)
    return moved
