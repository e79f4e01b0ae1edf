"""Read the JSON schemas of tools and answers as their authors mean them."""

from typing import Any

# Keywords of JSON Schema whose values are data, in which null is a value; and whose values are schemas by name.
DATA_KEYWORDS = frozenset({"const", "enum", "default", "examples", "example"})
NAMED_SCHEMAS_KEYWORDS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def without_nulls(schema: Any) -> Any:
    """Return a JSON schema without the keywords that are null, as clients send them for absent ones.

    `properties` that are null become an object without properties.
    """
    if isinstance(schema, list):
        return [without_nulls(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in DATA_KEYWORDS:
            kept[keyword] = value
        elif keyword in NAMED_SCHEMAS_KEYWORDS and isinstance(value, dict):
            kept[keyword] = {name: without_nulls(part) for name, part in value.items()}
        elif value is not None or keyword == "properties":
            kept[keyword] = {} if value is None else without_nulls(value)
    return kept


def read_parameters(parameters: Any) -> Any:
    """Return the schema of a function's parameters without null keywords; one of type null is an empty object."""
    # Clients describe a function without arguments in many ways; templates and grammars read one of them.
    if isinstance(parameters, dict) and parameters.get("type") == "null":
        return {"type": "object", "properties": {}}
    return without_nulls(parameters)
