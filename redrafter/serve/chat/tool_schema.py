"""JSON schema of the call that a model must write."""

from typing import Any

from redrafter.serve.protocol.messages import ToolChoice
from redrafter.serve.protocol.requests import ChatRequest

__all__ = ["call_schema"]

_ANY_OBJECT = {"type": "object"}
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


def call_schema(request: ChatRequest) -> dict[str, Any] | None:
    """Return the JSON schema of the one call that an answer must be, or None where `tool_choice` does not force one."""
    choice = request.tool_choice
    if not request.tools or choice in (None, "auto", "none"):
        return None
    named = choice.function.name if isinstance(choice, ToolChoice) else None
    functions = [tool.function for tool in request.tools if named in (None, tool.function.name)]
    definitions = {
        str(number): _move_schema(function.parameters or _ANY_OBJECT, f"#/$defs/{number}")
        for number, function in enumerate(functions)
    }
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


def _move_schema(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a schema for use at a path within another schema, with its references to itself adapted."""
    alone = {name: value for name, value in schema.items() if name not in ("$id", "$schema", "x-guidance")}
    moved = _move_references(alone, path)
    assert isinstance(moved, dict)
    return moved


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
