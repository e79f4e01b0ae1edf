"""Convert arguments that models write without quotes to JSON of the types that the tool's schema declares."""

import ast
import json
import re
from typing import Any, TypeGuard
from urllib.parse import unquote

# Python types by JSON type. Lookups take the first match: boolean precedes integer, as `bool` is a subclass of `int`.
JSON_TYPES: dict[str, Any] = {
    **{"boolean": bool, "integer": int, "number": float, "string": str},
    **{"array": list, "object": dict, "null": type(None)},
}
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
# Characters of Python literals. An f-string's prefix is excluded: `ast` takes quadratic time to parse its fields.
_LITERAL_TOKEN = re.compile(
    r"""\s+|[\[\](){},:+-]|[rRuU]?(?:"[^"\\]*(?:\\.[^"\\]*)*"|'[^'\\]*(?:\\.[^'\\]*)*')"""
    r"|(?:True|False|None)\b|[0-9.][\w.]*",
    re.DOTALL,
)
MAX_LITERAL_TOKENS = 1 << 14  # of a value that is not JSON; `ast` takes about 20 ms and 10 MiB to parse this number


def parameter_types(parameters: Any, name: str) -> set[str]:
    """Return the JSON types that a tool's schema declares for a parameter; empty if it declares none."""
    schema = parameters
    for _ in range(32):
        if not isinstance(schema, dict) or "properties" in schema or not is_inner(schema.get("$ref")):
            break
        schema = follow(parameters, schema["$ref"])
    found = _look_up(_look_up(schema, "properties"), name)
    return schema_types(_look_up(schema, "additionalProperties") if found is None else found, parameters)


def schema_types(schema: Any, root: Any) -> set[str]:
    """Return the JSON types that a schema declares, which may refer to other parts of `root`."""
    types, seen, todo = set[str](), set[int](), [schema]
    while todo:
        schema = todo.pop()
        if not isinstance(schema, dict) or id(schema) in seen:  # references may form a cycle
            continue
        seen.add(id(schema))
        declared = schema.get("type")
        listed: list[Any] = declared if isinstance(declared, list) else [declared]
        types.update(entry for entry in listed if isinstance(entry, str) and entry in JSON_TYPES)
        values: list[Any] = [schema["const"]] if "const" in schema else []
        if isinstance(enum := schema.get("enum"), list):
            values += enum
        # An untyped `enum` or `const` still decides how a written value is parsed.
        if declared is None:
            types.update(next(kind for kind in JSON_TYPES if isinstance(value, JSON_TYPES[kind])) for value in values)
        for keyword in ("anyOf", "oneOf", "allOf"):
            todo += schema[keyword] if isinstance(schema.get(keyword), list) else []
        if is_inner(schema.get("$ref")):
            todo.append(follow(root, schema["$ref"]))
    return types


def is_inner(reference: Any) -> TypeGuard[str]:
    """Return whether the value of `$ref` points to a part of the schema that contains it."""
    return isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))


def follow(root: Any, reference: str) -> Any:
    """Return the part of a schema that an inner reference points to; None if it does not exist."""
    value = root
    for part in reference.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and key.isdecimal() and len(key) < 9 and int(key) < len(value):
            value = value[int(key)]
        else:
            value = _look_up(value, key)
    return value


def as_json(written: str, types: set[str] | None) -> str | None:
    """Return a value written without quotes as JSON of one of the given types, or None if it fits none of them.

    If `types` is None, any JSON is accepted.
    """
    # Models that were trained on Python write True, False and None in JSON too.
    written = _PYTHON_NAMES.get(written, written)
    try:
        value = json.loads(written, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    if types is None:
        return written
    kind = next(kind for kind in JSON_TYPES if isinstance(value, JSON_TYPES[kind]))
    # JSON Schema counts 2.0 as an integer, which callers may not parse as one.
    if kind == "number" and "number" not in types and "integer" in types and value.is_integer():
        return f"{int(value)}"
    return written if kind in types or (kind == "integer" and "number" in types) else None


def python_as_json(source: str) -> str:
    """Return a Python expression as JSON: the value of a literal, or the source as a string if it is not a literal."""
    if (written := as_json(source, None)) is not None:
        return written
    # `ast.literal_eval` needs much time and stack for long or nested sources, so only short plain literals reach it.
    other, count = _LITERAL_TOKEN.subn("", source)
    try:
        value = source if other or count > MAX_LITERAL_TOKENS else ast.literal_eval(source)
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return json.dumps(source, ensure_ascii=False)
    # A lone surrogate cannot be encoded as UTF-8; escaped, it can be sent.
    return json.dumps(value) if _LONE_SURROGATE.search(text) else text


def _look_up(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")
