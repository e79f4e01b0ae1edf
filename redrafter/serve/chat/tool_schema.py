"""The schema of a call that a model must write."""

from typing import Any

from redrafter.serve.protocol.requests import ChatRequest, ToolChoice

__all__ = ["schema_of"]

_ANY = {"type": "object"}
# Without this, a model may fill a call with spaces and line breaks until no token is left. A separator is a regular
# expression; a space after it is how models are trained to write JSON.
_TIGHT = {
    "whitespace_pattern": None,
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
# Keywords whose values are data, and keywords whose values are schemas by name.
_DATA = frozenset({"const", "enum", "default", "examples", "example"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def schema_of(request: ChatRequest) -> dict[str, Any] | None:
    """Return the schema of the one call that the text must be; None where it need not be one."""
    choice = request.tool_choice
    if not request.tools or choice in (None, "auto", "none"):
        return None
    named = choice.function.name if isinstance(choice, ToolChoice) else None
    functions = [tool.function for tool in request.tools if named in (None, tool.function.name)]
    definitions = {
        str(number): _rebased(function.parameters or _ANY, f"#/$defs/{number}")
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
    return {"x-guidance": _TIGHT, "anyOf": calls, "$defs": definitions}


def _rebased(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """Return a schema that stood alone as it reads at a place within another: references to itself lead there."""
    alone = {name: value for name, value in schema.items() if name not in ("$id", "$schema", "x-guidance")}
    found = _referring(alone, place)
    assert isinstance(found, dict)
    return found


def _referring(schema: Any, place: str) -> Any:
    if isinstance(schema, list):
        return [_referring(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            found[keyword] = place + value[1:]
        elif keyword in _BY_NAME and isinstance(value, dict):
            found[keyword] = {name: _referring(each, place) for name, each in value.items()}
        else:
            found[keyword] = value if keyword in _DATA else _referring(value, place)
    return found
