"""Interpret JSON schemas of arguments that are written without quotes: keywords, formats, references, patterns."""

import json
import re
from typing import Any

from redrafter.chat.schemas import DATA_KEYWORDS, NAMED_SCHEMAS_KEYWORDS
from redrafter.errors import ArgumentError
from redrafter.serve.answers.arguments import as_json, follow, is_inner

DEFINITIONS = ("$defs", "definitions")
IGNORED = frozenset({"$id", "$schema", "x-guidance"})  # at the top of a tool's parameters
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "nullable"}
    | {"$comment", "contentEncoding", "contentMediaType"}
)
_OF_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
OF_OTHER_TYPES = _OF_NUMBERS | frozenset(  # keywords that do not constrain strings
    {"items", "prefixItems", "minItems"}
    | {"maxItems", "uniqueItems", "properties", "required", "additionalProperties", "patternProperties"}
    | {"minProperties", "maxProperties"}
)
TEXT_KEYWORDS = frozenset({"type", "enum", "const", "minLength", "maxLength", "pattern", "format"})
_HOUR = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_DAY = (
    r"[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
FORMATS = {
    "date": _DAY,
    "time": _HOUR,
    "date-time": f"{_DAY}T{_HOUR}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "email": r"[a-zA-Z0-9_%+-]+(\.[a-zA-Z0-9_%+-]+)*@([a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?\.)+[a-zA-Z]{2,63}",
    "ipv4": r"((25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])",
    "uri": r"[a-z][a-z0-9+.-]*:(//[a-zA-Z0-9.-]+(:[0-9]+)?)?[a-zA-Z0-9._~%!$&'()*+,;=:@/?-]+",
}
_INTEGER = "-?(0|[1-9][0-9]*)"
_SCALARS = {
    "null": '"null"',
    "boolean": '"true" | "false"',
    "integer": f"/{_INTEGER}/",
    "number": f"/{_INTEGER}(\\.[0-9]+)?([eE][+-]?[0-9]{{1,2}})?/",
}
# Patterns a string must not match if values of other types are allowed: the reader would parse it as one of those.
LOOKS_LIKE = {
    "null": "(null|None)",
    "boolean": "(true|false|True|False)",
    "integer": "-?[0-9][0-9.eE+-]*",
    "number": "-?[0-9][0-9.eE+-]*",
    "array": r"\[(?s:.*)",
    "object": r"\{(?s:.*)",
}


def scalar_terminals(schema: dict[str, Any]) -> list[str] | None:
    """Return terminals for a schema's values of any type but string; None if terminals cannot describe them."""
    kinds = schema["type"] if isinstance(schema.get("type"), list) else []
    if "enum" in schema:
        values = [value for value in schema["enum"] if not isinstance(value, dict | list)]
        fitting = [value for value in values if not kinds or as_json(json.dumps(value), {*kinds}) is not None]
        return [json.dumps(json.dumps(value)) for value in fitting] if fitting == schema["enum"] else None
    if not {*schema}.isdisjoint(_OF_NUMBERS) or not {*schema} <= ANNOTATIONS | OF_OTHER_TYPES | TEXT_KEYWORDS:
        return None
    return [_SCALARS[kind] for kind in kinds] if {*kinds} <= _SCALARS.keys() else None


def escape_pattern(pattern: str) -> str:
    """Convert a schema's regular expression to Lark's form between slashes, with ASCII digits and letters."""
    # JSON Schema uses ECMAScript's classes, which are ASCII; the classes of the grammar engine are Unicode.
    written = {
        "\\d": "[0-9]",
        "\\D": "[^0-9]",
        "\\w": "[a-zA-Z0-9_]",
        "\\W": "[^a-zA-Z0-9_]",
        "/": "\\/",
        "\n": "\\n",
        "\\\n": "\\n",
    }
    return re.sub(r"\\.|/|\n", lambda found: written.get(found[0], found[0]), pattern, flags=re.DOTALL)


def scan_pattern(pattern: str) -> tuple[bool, bool] | None:
    """Return whether a regular expression has `|` outside of parentheses, and whether it ends with `$`.

    Returns None if its parentheses are unbalanced.
    """
    depth, in_class, choice, ends = 0, False, False, False
    characters = iter(pattern)
    for character in characters:
        ends = character == "$" and not in_class
        if character == "\\":
            next(characters, None)
        elif in_class:
            in_class = character != "]"
        else:
            in_class = character == "["
            # Only an alternative at the top level changes the meaning of anchors.
            depth += (character == "(") - (character == ")")
            choice |= character == "|" and depth == 0
            if depth < 0:
                return None
    return None if depth or in_class else (choice, ends)


def drop_ignored(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without the top-level keywords that do not affect a grammar."""
    return {name: value for name, value in schema.items() if name not in IGNORED}


def _follow(root: Any, reference: str) -> Any:
    """Return the target of a reference within a schema, or raise `ArgumentError`."""
    if (found := follow(root, reference)) is None:
        raise ArgumentError(f"grammar: the schema has no {reference[:80]!r}, to which it refers")
    return found


def resolve(schema: Any, root: Any) -> dict[str, Any]:
    """Replace a reference to a part of `root` by that part, and return the schema."""
    # A bound, since references may form a cycle.
    for _ in range(32):
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise ArgumentError(f"grammar: {str(schema)[:80]!r} is no schema of a value")
        if not is_inner(schema.get("$ref")) or {*schema} - {"$ref"} - ANNOTATIONS - IGNORED - {*DEFINITIONS}:
            return schema
        schema = _follow(root, schema["$ref"])
    raise ArgumentError("grammar: references of the schema lead in a circle")


def standalone(schema: Any, root: Any) -> dict[str, Any]:
    """Return a part of a schema as a self-contained schema, with everything that it refers to in `$defs`."""
    # Definitions are renumbered, since a part of the schema has another root than its references assume.
    numbers: dict[str, str] = {}
    todo: list[str] = []

    def move(value: Any) -> Any:
        if isinstance(value, list):
            return [move(entry) for entry in value]
        if not isinstance(value, dict):
            return value
        moved: dict[str, Any] = {}
        for keyword, content in value.items():
            if keyword == "$ref" and is_inner(content):
                if content not in numbers:
                    numbers[content] = str(len(numbers))
                    todo.append(content)
                moved[keyword] = f"#/$defs/{numbers[content]}"
            elif keyword in NAMED_SCHEMAS_KEYWORDS and isinstance(content, dict):
                if keyword not in DEFINITIONS:
                    moved[keyword] = {name: move(part) for name, part in content.items()}
            else:
                moved[keyword] = content if keyword in DATA_KEYWORDS else move(content)
        return moved

    alone = move(schema)
    definitions = {}
    while todo:
        reference = todo.pop()
        definitions[numbers[reference]] = move(_follow(root, reference))
    return {**drop_ignored(alone), "$defs": definitions} if definitions else drop_ignored(alone)
