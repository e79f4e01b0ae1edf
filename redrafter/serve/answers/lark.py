"""Build grammars of answers in llguidance's Lark: thoughts, marks that may be special tokens, and arguments of calls.

A reader of calls (`redrafter.serve.answers.reader`) composes the grammar of its format from these parts, so that a
model that must call a tool writes the format it was trained on, and the reader can parse it.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from redrafter.chat.thoughts import Thinking, ThoughtMarks
from redrafter.errors import ArgumentError
from redrafter.grammar.limits import MAX_GRAMMAR_CHARS
from redrafter.grammar.source import GrammarSource, checked_text
from redrafter.serve.answers.arguments import as_json, follow, is_inner, schema_types

_DEFINITIONS = ("$defs", "definitions")
_IGNORED = frozenset({"$id", "$schema", "x-guidance"})  # at the top of a tool's parameters
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "nullable"}
    | {"$comment", "contentEncoding", "contentMediaType", *_IGNORED, *_DEFINITIONS}
)
_REFERENCE = re.compile(r'"\$ref": "((?!#/\$defs/|#/definitions/)[^"]*)"')  # to another place than the definitions
# Without this, a model may fill a call with spaces and line breaks until the token limit. A separator is a regular
# expression; it allows a space because models are trained to write JSON with one.
_COMPACT_JSON = {
    "whitespace_pattern": None,
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
_BLANKS = r"/[ \t\r\n]+/"


class Argument(NamedTuple):
    """An argument that is written by name.

    Attributes:
        name: Its name; None for any name that the tool's parameters leave free.
        schema: Its JSON schema.
        required: Whether every call has it.
    """

    name: str | None
    schema: Any
    required: bool


class CalledTool(NamedTuple):
    """A tool that may be called.

    Attributes:
        name: Its name.
        parameters: The JSON schema of its parameters; references start at that schema's root.
        strict: Whether a form that cannot enforce all of the schema is an error.
    """

    name: str
    parameters: dict[str, Any]
    strict: bool = True


class LarkWriter:
    """Writes one grammar. Methods return Lark expressions, and add the rules that these refer to.

    Args:
        special: Ids of tokens that the grammar's text cannot spell, by their decoded text.
        form: Name of the form of calls, for messages.
    """

    def __init__(self, special: Mapping[str, int], form: str = ""):
        self._special, self._form = special, form
        self._rules: list[str] = []
        self._names: dict[str, str] = {}  # names of rules, by body
        self._spells = False  # whether a schema spells a special token
        self._size = 0  # characters of all rules
        self._definitions: dict[str, str] = {}  # of the tools' parameters as JSON, by the tool's name
        names = sorted(special, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, names))})" if names else "(?!)()")

    def source(self, start: str) -> GrammarSource:
        """Return the grammar that begins with an expression."""
        return GrammarSource("lark", checked_text(self.text(start)))

    def text(self, start: str) -> str:
        """Return the text of the grammar that begins with an expression."""
        # If the decoded text of a special token is the only continuation, llguidance would require that token instead.
        options = ['%llguidance {"no_forcing": true}'] if self._spells else []
        return "\n".join([*options, f"start: {start}", *self._rules]) + "\n"

    def rule(self, body: str, terminal: bool = False) -> str:
        """Return the name of a rule, or of a terminal, with a body."""
        if (name := self._names.get(body)) is None:
            name = self._names[body] = f"{'T' if terminal else 'r'}{len(self._rules)}"
            self._rules.append(f"{name}: {body}")
            self._size += len(body)
            if self._size > MAX_GRAMMAR_CHARS:
                what = "grammar: the tools' parameters are too large for calls of the form"
                raise ArgumentError(f"{what} {self._form!r}: offer fewer or smaller tools")
        return name

    def has(self, token: str) -> bool:
        """Return whether a special token decodes to this text."""
        return token in self._special

    def mark(self, text: str) -> str:
        """Return an expression for marks of the format, in which special tokens match as tokens and not as text."""
        return " ".join(self._pieces(text)) or '""'

    def _pieces(self, text: str) -> list[str]:
        parts = self._pattern.split(text)
        return [f"<[{self._special[x]}]>" if index % 2 else json.dumps(x) for index, x in enumerate(parts) if x]

    def free(self, *marks: str, bare: str = "") -> str:
        """Return an expression for any text that contains none of the marks; other special tokens are allowed.

        Its first character that is not blank is none of `bare`.
        """
        first, *special = self._free(marks, bare)
        if not bare:
            return f"({' | '.join([first, *special])})*"
        return f"({first} {self.free(*marks)} | {self.rule(_BLANKS, terminal=True)})?"

    def up_to(self, mark: str, *others: str, bare: str = "") -> str:
        """Return an expression for text without the marks, up to and including `mark`. `bare` is as in `free`."""
        marks = (mark, *others)
        head, *rest = self._pieces(mark)
        if head.startswith("<"):
            return " ".join([self.free(*marks, bare=bare), head, *rest])

        def text_and_mark(*others: str) -> str:  # one lexeme for both, since lexemes match greedily
            return self.rule(f"(/(?s:.*)/ & {_without(*marks, others=others)}) {head}", terminal=True)

        if not bare:
            return " ".join([self.free(*marks), text_and_mark(), *rest])
        text, *special = self._free(marks, bare)
        after_special = [f"{text} {' '.join(special)} {self.free(*marks)} {text_and_mark()}"] if special else []
        at_once = text_and_mark(f"/[ \\t\\r\\n]*[{re.escape(bare)}](?s:.*)/")
        return " ".join([f"({' | '.join([at_once, *after_special])})", *rest])

    def _free(self, marks: tuple[str, ...], bare: str) -> list[str]:
        """Return expressions for nonempty text (nonblank if `bare` is given), and for special tokens."""
        excluded = {token for content, token in self._special.items() if any(content in mark for mark in marks)}
        text = f"/[ \\t\\r\\n]*[^ \\t\\r\\n{re.escape(bare)}](?s:.*)/" if bare else "/(?s:.+)/"
        text = self.rule(f"{text} & {_without(*marks)}", terminal=True)
        return [text, *_token_ranges({*self._special.values()} - excluded)]

    def after_thought(self, marks: ThoughtMarks | None, thinking: Thinking, rest: str) -> str:
        """Return an expression for a thought, opened by the prompt or by the model, and then `rest`."""
        if marks is None or thinking == "over":
            return rest
        blank = self.rule(r"/[ \t\r\n]{1,4}/", terminal=True)
        thought = f"{self.up_to(marks.end)} {blank}?"
        return f"{thought} {rest}" if thinking == "open" else f"({self.mark(marks.begin)} {thought})? {rest}"

    def json(self, schema: dict[str, Any]) -> str:
        """Return an expression for compact JSON of a schema."""
        self._look_for_tokens(schema)
        schema = {name: value for name, value in schema.items() if name not in _IGNORED}
        return self.rule(f"%json {GrammarSource.json_schema({'x-guidance': _COMPACT_JSON, **schema}).text}")

    def argument(self, tool: CalledTool, schema: dict[str, Any]) -> str:
        """Return an expression for compact JSON of an argument's schema, which may refer to the tool's definitions."""
        own = {name: value for name, value in schema.items() if name not in (*_IGNORED, *_DEFINITIONS)}
        text = json.dumps({"x-guidance": _COMPACT_JSON, **own})
        if '"$ref"' in text:
            if tool.name not in self._definitions:
                named = {name: tool.parameters[name] for name in _DEFINITIONS if name in tool.parameters}
                self._definitions[tool.name] = json.dumps(named)
            if (other := _REFERENCE.search(text + self._definitions[tool.name])) is not None:
                raise self.refuse(tool, f"the reference {other[1][:80]!r}")
            text = f"{text[:-1]}, {self._definitions[tool.name][1:]}"
        return self.rule(f"%json {text}")

    def refuse(self, tool: CalledTool, what: str) -> ArgumentError:
        """Return an error about a part of a tool's parameters that the format cannot enforce."""
        return ArgumentError(
            f"grammar: the parameters of {tool.name!r} have {what}, which cannot be kept to in calls of the form "
            f"{self._form!r}: leave it out, or start the server with --tool-call-parser hermes"
        )

    def arguments(self, tool: CalledTool, name: re.Pattern[str]) -> Iterator[Argument]:
        """Yield the arguments in order, for a format that writes them one by one.

        Args:
            tool: The tool.
            name: Pattern that the whole name must match to be valid in the format.

        Raises:
            ArgumentError: Such a format cannot enforce the parameters of a strict tool, or those of any tool.
        """
        GrammarSource.json_schema(tool.parameters)  # checks its size
        self._look_for_tokens(tool.parameters)
        schema = _resolve(tool.parameters, tool.parameters)
        known = _ANNOTATIONS | {"type", "properties", "required", "additionalProperties"}
        if tool.strict and (unknown := [keyword for keyword in schema if keyword not in known]):
            raise self.refuse(tool, f"{unknown[0]!r} at their top")
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if schema.get("type", "object") != "object" or not (
            isinstance(properties, dict) and isinstance(required, list) and all(isinstance(x, str) for x in required)
        ):
            raise self.refuse(tool, "another type than an object")
        more = schema.get("additionalProperties", "properties" not in schema)
        for key in dict.fromkeys([*properties, *required]):
            if name.fullmatch(key) is None:
                raise self.refuse(tool, f"an argument called {key[:80]!r}")
            if (value := properties.get(key, schema.get("additionalProperties", True))) is not False:
                yield Argument(key, _resolve(value, tool.parameters), key in required)
            elif key in required:
                raise self.refuse(tool, f"the argument {key!r}, which is required and may not be given")
        if more is not False:
            yield Argument(None, _resolve(more, tool.parameters), False)

    def _look_for_tokens(self, schema: dict[str, Any]) -> None:
        self._spells = self._spells or self._pattern.search(json.dumps(schema, ensure_ascii=False)) is not None

    def free_name(self, tool: CalledTool) -> str:
        """Return a terminal for the name of an argument that a tool's parameters do not have."""
        taken = [key for key in _resolve(tool.parameters, tool.parameters).get("properties", {}) if key]
        others = f" & ~({' | '.join(json.dumps(key) for key in taken)})" if taken else ""
        return self.rule(f"/[a-zA-Z_][a-zA-Z0-9_]{{0,63}}/{others}", terminal=True)

    def unquoted(self, tool: CalledTool, argument: Argument, end: str, mark: str) -> str:
        """Return an expression for a value without quotes, followed by its end.

        Args:
            tool: The tool.
            argument: The argument.
            end: Text of the form after the value.
            mark: The part of `end` that no value may hold.
        """
        head, *rest = self._pieces(end)
        types = schema_types(argument.schema, tool.parameters)
        if types and "string" not in types:
            return " ".join([self.argument(tool, argument.schema), head, *rest])
        values, kept = _written_values(argument.schema, types, mark), {"type"}
        text = f"(/(?s:.*)/ & {_without(mark)})"
        if values:
            text, kept = f"({' | '.join(map(json.dumps, values))})", {"type", "enum", "const"}
        if tool.strict and (unkept := sorted(_keywords(argument.schema) - kept - _ANNOTATIONS)):
            raise self.refuse(tool, f"{unkept[0]!r} for the text {argument.name!r}")
        if not head.startswith("<"):  # one lexeme for value and end, since lexemes match greedily
            return " ".join([self.rule(f"{text} {head}", terminal=True), *rest])
        written = self.rule(f"{text} & /(?s:.+)/", terminal=True)
        return " ".join([f"{written}?" if "" in values or not values else written, head, *rest])


def _written_values(schema: dict[str, Any], types: set[str], mark: str) -> list[str]:
    """Return an enumeration's values as they are written; empty if one of them would be read as another value."""
    listed = schema.get("enum", [schema["const"]] if "const" in schema else [])
    values = listed if isinstance(listed, list) and not ("enum" in schema and "const" in schema) else []
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    for value, text in zip(values, texts, strict=True):
        is_text = as_json(text.strip(), types - {"string"}) is None
        if is_text != isinstance(value, str) or mark in text or text != text.strip("\n"):
            return []
    return texts


def _keywords(schema: dict[str, Any]) -> set[str]:
    """Return the keywords of a schema, and those of its alternatives in place of `anyOf`."""
    if not isinstance(listed := schema.get("anyOf"), list) or "type" in schema:
        return {*schema}
    return ({*schema} - {"anyOf"}).union(*(each for each in listed if isinstance(each, dict)))


def _resolve(schema: Any, root: Any) -> dict[str, Any]:
    """Replace a reference to a part of `root` by that part, and return the schema."""
    # A bound, since references may form a cycle.
    for _ in range(32):
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise ArgumentError(f"grammar: {str(schema)[:80]!r} is no schema of a value")
        reference = schema.get("$ref")
        if not is_inner(reference) or {*schema} - {"$ref"} - _ANNOTATIONS:
            return schema
        if (found := follow(root, reference)) is None:
            raise ArgumentError(f"grammar: the schema has no {reference[:80]!r}, to which it refers")
        schema = found
    raise ArgumentError("grammar: references of the schema lead in a circle")


def _without(*marks: str, others: Iterable[str] = ()) -> str:
    """Return a terminal for text that contains none of the marks and that no terminal of `others` matches."""
    # The complement of one union has few automaton states; an intersection of complements has their product.
    found = f"/(?s:.*)/ ({' | '.join(map(json.dumps, dict.fromkeys(marks)))}) /(?s:.*)/"
    return f"~({' | '.join([found, *others])})"


def _token_ranges(tokens: Iterable[int]) -> list[str]:
    """Return a list with one expression that matches any of the tokens; empty if there are no tokens."""
    ranges: list[list[int]] = []
    for token in sorted(tokens):
        if ranges and ranges[-1][1] == token - 1:
            ranges[-1][1] = token
        else:
            ranges.append([token, token])
    return [f"<[{','.join(f'{a}-{b}' if a < b else f'{a}' for a, b in ranges)}]>"] if ranges else []
