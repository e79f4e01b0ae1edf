"""The text of a grammar as a user wrote it, checked for its size before anything parses it."""

import json
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from redrafter.errors import ArgumentError
from redrafter.grammar.limits import MAX_GRAMMAR_CHARS, MAX_SCHEMA_DEPTH

KINDS = ("json_schema", "json_object", "regex", "lark", "ebnf", "choice")
MAX_JSON_CHARS = 6 * MAX_GRAMMAR_CHARS  # of a grammar as JSON with every character escaped


class GrammarSource(NamedTuple):
    """The notation and text of a grammar that is small enough to be parsed. Equal sources are the same grammar.

    Attributes:
        kind: The notation; "llguidance" is llguidance's own.
        text: The grammar in that notation.
        around: A Lark grammar that refers to this one as `@answer`; empty for none.
    """

    kind: Literal["json_schema", "regex", "lark", "ebnf", "llguidance"]
    text: str
    around: str = ""

    @classmethod
    def from_spec(cls, spec: object) -> "GrammarSource":
        """Make a source of a mapping from one of `KINDS` to its value, such as `{"regex": ...}`, or of its JSON.

        Raises:
            ArgumentError: The mapping is of another form, or the grammar is too large.
        """
        mapping = spec
        if isinstance(spec, str):
            # Checked before parsing, whose memory grows with the text.
            if len(spec) > MAX_JSON_CHARS:
                raise ArgumentError(f"grammar: it has {len(spec)} characters as JSON, {MAX_JSON_CHARS} are the most")
            try:
                mapping = json.loads(spec)
            except (ValueError, RecursionError) as error:
                raise ArgumentError(
                    f"grammar: write {{'regex': ...}}, {{'lark': ...}} or {{'ebnf': ...}} around a text that is "
                    f"not JSON: {' '.join(str(error).split()):.300}"
                ) from error
        if not isinstance(mapping, Mapping) or len(mapping) != 1 or next(iter(mapping)) not in KINDS:
            schema = ": write {'json_schema': ...} around a schema" if isinstance(mapping, Mapping) else ""
            raise ArgumentError(f"grammar: one of {', '.join(KINDS)} and its value, got {_shorten(spec)}{schema}")
        [(kind, value)] = mapping.items()
        if kind == "json_object" and value is not True:
            raise ArgumentError(f"grammar: json_object is true or left out, got {_shorten(value)}")
        if kind == "json_object":
            return cls.json_schema({"type": "object"})
        if kind == "json_schema":
            return cls.json_schema(value)
        return cls.choice(value) if kind == "choice" else cls(kind, checked_text(value))

    @classmethod
    def json_schema(cls, schema: object) -> "GrammarSource":
        """Make a source of a JSON schema, given as Python objects or as JSON."""
        if isinstance(schema, str):
            return cls("json_schema", checked_text(schema))
        _check_schema(schema)
        try:
            text = json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(f"grammar: {' '.join(str(error).split()):.300}") from error
        return cls("json_schema", checked_text(text))

    @classmethod
    def choice(cls, texts: object) -> "GrammarSource":
        """Make a source, in Lark, that allows one of several texts."""
        if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:
            raise ArgumentError(f"grammar: choice takes a list of texts, at least one, got {_shorten(texts)}")
        size = 5 * len(texts)  # the quotes, spaces and `|` around each text
        for text in texts:
            # The sum is checked at each text, so that a huge list is refused early.
            size += len(text) if isinstance(text, str) else 0
            _check_length(size)
            checked_text(text)
        return cls("lark", checked_text("start: " + " | ".join(json.dumps(text) for text in texts)))


def checked_text(value: object) -> str:
    """Return a text unchanged; raises `ArgumentError` if it is too long or cannot be encoded in UTF-8."""
    if not isinstance(value, str):
        raise ArgumentError(f"grammar: a text is needed, got {_shorten(value)}")
    _check_length(len(value))
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(
            f"grammar: a lone surrogate, which is not a character, {value[error.start]!r}, at {error.start}"
        ) from error
    return value


def _check_length(characters: int) -> None:
    if characters > MAX_GRAMMAR_CHARS:
        raise ArgumentError(f"grammar: it has {characters} characters, {MAX_GRAMMAR_CHARS} are the most")


def _check_schema(schema: object) -> None:
    """Raise `ArgumentError` for a schema that is nested too deeply or would be too long as JSON.

    At most `MAX_GRAMMAR_CHARS` parts of it are checked. Lone surrogates, which JSON can express and UTF-8 cannot, are
    refused as well.
    """
    # Level by level, not by recursion, which a deeply nested schema would exhaust.
    level: list[object] = [schema]
    size = 0
    for _ in range(MAX_SCHEMA_DEPTH + 1):
        below: list[object] = []
        for part in level:
            size += _min_json_length(part)
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


def _min_json_length(part: object) -> int:
    """Return the minimum number of characters of this part as JSON, without the parts inside it."""
    if isinstance(part, str):
        return len(part) + 2
    if isinstance(part, bool):
        return 4
    if isinstance(part, int):
        # Three decimal digits for ten bits: printing a huge integer would take quadratic time.
        return 1 + max(part.bit_length() - 1, 0) * 3 // 10
    if isinstance(part, dict):
        return max(2, 4 * len(part))
    return max(2, 2 * len(part)) if isinstance(part, list | tuple) else 1


def _shorten(value: object) -> str:
    """Return the beginning of a value, for an error message; the value may have any size and depth."""
    if isinstance(value, str):
        return f"{value[:80]!r:.80}"
    if isinstance(value, dict | list | tuple | set):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{value!r:.80}"
