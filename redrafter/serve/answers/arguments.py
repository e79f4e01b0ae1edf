"""Arguments that models write without quotes, as JSON of the types that a tool's schema gives to them."""

import json
from typing import Any

# Types of JSON, as Python reads them; a boolean is an integer there too.
_TYPES: dict[str, Any] = {
    "boolean": bool,
    "integer": int,
    "number": float,
    "string": str,
    "array": list,
    "object": dict,
    "null": type(None),
}
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}


def parameter_types(parameters: Any, name: str) -> set[str]:
    """Return the JSON types that a tool's schema gives to a parameter; none where it says nothing of it."""
    types, seen, todo = set[str](), set[int](), [_look_up(_look_up(parameters, "properties"), name)]
    while todo:
        schema = todo.pop()
        if not isinstance(schema, dict) or id(schema) in seen:  # a schema may lead to itself
            continue
        seen.add(id(schema))
        declared = schema.get("type")
        listed: list[Any] = declared if isinstance(declared, list) else [declared]
        types.update(entry for entry in listed if isinstance(entry, str) and entry in _TYPES)
        values: list[Any] = [schema["const"]] if "const" in schema else []
        if isinstance(enum := schema.get("enum"), list):
            values += enum
        if declared is None:
            types.update(next(kind for kind in _TYPES if isinstance(value, _TYPES[kind])) for value in values)
        for keyword in ("anyOf", "oneOf", "allOf"):
            todo += schema[keyword] if isinstance(schema.get(keyword), list) else []
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            target = parameters
            for part in reference[2:].split("/"):
                target = _look_up(target, part)
            todo.append(target)
    return types


def as_json(written: str, types: set[str] | None) -> str | None:
    """Return a value that was written without quotes as JSON of one of some types, or None if it is of none of them.

    Without types, any JSON will do.
    """
    written = _PYTHON_NAMES.get(written, written)
    try:
        value = json.loads(written, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    if types is None:
        return written
    kind = next(kind for kind in _TYPES if isinstance(value, _TYPES[kind]))
    if kind == "number" and "number" not in types and "integer" in types and value.is_integer():
        return f"{int(value)}"
    return written if kind in types or (kind == "integer" and "number" in types) else None


def _look_up(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
