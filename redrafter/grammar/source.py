"""What a grammar is written in, checked for its size before anything reads it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from redrafter.errors import ArgumentError
from redrafter.grammar.limits import MAX_GRAMMAR_CHARS, MAX_SCHEMA_DEPTH

__all__ = ["GrammarSource"]

KINDS = ("json_schema", "json_object", "regex", "lark", "ebnf", "choice")
MAX_JSON_CHARS = 6 * MAX_GRAMMAR_CHARS  # characters of a grammar in JSON, each of them escaped


class GrammarSource(NamedTuple):
    """The text of a grammar, small enough to be read. Equal sources are the same grammar.

    Args:
        kind: the notation; "llguidance" is llguidance's own.
        text: what is written in it.
    """

    kind: Literal["json_schema", "regex", "lark", "ebnf", "llguidance"]
    text: str

    @classmethod
    def of(cls, spec: object) -> "GrammarSource":
        """Read `{"regex": ...}` and its like, or such a thing in JSON. Raises `ArgumentError`."""
        given = _from_json(spec) if isinstance(spec, str) else spec
        if not isinstance(given, Mapping) or len(given) != 1 or next(iter(given)) not in KINDS:
            raise ArgumentError(f"grammar: one of {', '.join(KINDS)} and its value, got {_told(spec)}")
        [(kind, value)] = given.items()
        if kind == "json_object" and value is not True:
            raise ArgumentError(f"grammar: json_object is true or left out, got {_told(value)}")
        if kind == "json_object":
            return cls.json_schema({"type": "object"})
        if kind == "json_schema":
            return cls.json_schema(value)
        return cls.choice(value) if kind == "choice" else cls(kind, checked_text(value))

    @classmethod
    def json_schema(cls, schema: object) -> "GrammarSource":
        """Read a schema, as Python holds it or as JSON."""
        if isinstance(schema, str):
            return cls("json_schema", checked_text(schema))
        _check_size(schema)
        try:
            text = json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(f"grammar: {' '.join(str(error).split()):.300}") from error
        return cls("json_schema", checked_text(text))

    @classmethod
    def choice(cls, texts: object) -> "GrammarSource":
        """Write a choice of texts in Lark."""
        if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:
            raise ArgumentError(f"grammar: choice takes a list of texts, at least one, got {_told(texts)}")
        size = 5 * len(texts)  # quotes and a stroke
        for text in texts:
            size += len(text) if isinstance(text, str) else 0
            _check_length(size)
            checked_text(text)
        return cls("lark", checked_text("start: " + " | ".join(json.dumps(text) for text in texts)))


def checked_text(given: object) -> str:
    """A text that is short enough and can be written in UTF-8."""
    if not isinstance(given, str):
        raise ArgumentError(f"grammar: a text is needed, got {_told(given)}")
    _check_length(len(given))
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"grammar: half a character, {given[error.start]!r}, at {error.start}") from error
    return given


def _from_json(text: str) -> Any:
    if len(text) > MAX_JSON_CHARS:
        raise ArgumentError(f"grammar: it has {len(text)} characters as JSON, {MAX_JSON_CHARS} are the most")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"grammar: not JSON: {' '.join(str(error).split()):.300}") from error


def _check_length(characters: int) -> None:
    if characters > MAX_GRAMMAR_CHARS:
        raise ArgumentError(f"grammar: it has {characters} characters, {MAX_GRAMMAR_CHARS} are the most")


def _check_size(schema: object) -> None:
    """Refuse what is too deep, or would be too long as JSON, after a look at no more than
    `MAX_GRAMMAR_CHARS` parts of it; and
    halves of characters, which JSON can write and nobody can read."""
    level, size = [schema], 0
    for _ in range(MAX_SCHEMA_DEPTH + 1):
        below: list[object] = []
        for part in level:
            size += _least_length(part)
            if size > MAX_GRAMMAR_CHARS:
                raise ArgumentError(f"grammar: it has {size} characters or more, {MAX_GRAMMAR_CHARS} are the most")
            if isinstance(part, str):
                checked_text(part)
            elif isinstance(part, dict):
                below += part.keys()
                below += part.values()
            elif isinstance(part, list | tuple):
                below += part
        if not below:
            return
        level = below
    raise ArgumentError(f"grammar: objects and lists are nested more than {MAX_SCHEMA_DEPTH} deep")


def _least_length(part: object) -> int:
    """Count characters that this part has in JSON at least, without those of the parts in it."""
    if isinstance(part, str):
        return len(part) + 2
    if isinstance(part, bool):
        return 4
    if isinstance(part, int):
        return 1 + max(part.bit_length() - 1, 0) * 3 // 10
    if isinstance(part, dict):
        return max(2, 4 * len(part))
    return max(2, 2 * len(part)) if isinstance(part, list | tuple) else 1


def _told(given: object) -> str:
    """The beginning of what was given, however large or deep it is."""
    if isinstance(given, str):
        return f"{given[:80]!r:.80}"
    if isinstance(given, dict | list | tuple | set):
        return f"a {type(given).__name__} of {len(given)}"
    return f"{given!r:.80}"
