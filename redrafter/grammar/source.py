"""The text of a grammar as a user wrote it, checked for its size before anything parses it."""

import json
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from redrafter.errors import ArgumentError, check_characters
from redrafter.grammar.limits import MAX_GRAMMAR_CHARS

KINDS = ("json_schema", "json_object", "regex", "lark", "ebnf", "choice")


class GrammarSource(NamedTuple):
    """The notation and text of a grammar that is small enough to be parsed. Equal sources are the same grammar.

    Attributes:
        kind: The notation.
        text: The grammar in that notation.
        around: A Lark grammar that refers to this one as `@answer`; empty for none.
    """

    kind: Literal["json_schema", "regex", "lark", "ebnf"]
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
        try:
            # Unescaped, so that a lone surrogate is found.
            text = json.dumps(schema, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(f"grammar: {' '.join(str(error).split()):.300}") from error
        return cls("json_schema", checked_text(text))

    @classmethod
    def choice(cls, texts: object) -> "GrammarSource":
        """Make a source, in Lark, that allows one of several texts."""
        if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:
            raise ArgumentError(f"grammar: choice takes a list of texts, at least one, got {_shorten(texts)}")
        return cls("lark", checked_text("start: " + " | ".join(json.dumps(checked_text(text)) for text in texts)))


def checked_text(value: object) -> str:
    """Return a text unchanged; raises `ArgumentError` if it is too long or cannot be encoded in UTF-8."""
    if not isinstance(value, str):
        raise ArgumentError(f"grammar: a text is needed, got {_shorten(value)}")
    if len(value) > MAX_GRAMMAR_CHARS:
        raise ArgumentError(f"grammar: it has {len(value)} characters, {MAX_GRAMMAR_CHARS} are the most")
    check_characters(value, "grammar: a text")
    return value


def _shorten(value: object) -> str:
    """Return the beginning of a value, for an error message; the value may have any size and depth."""
    if isinstance(value, str):
        return f"{value[:80]!r:.80}"
    if isinstance(value, dict | list | tuple | set):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{value!r:.80}"
