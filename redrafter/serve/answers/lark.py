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
from redrafter.serve.answers.arguments import JSON_TYPES, as_json, schema_types
from redrafter.serve.answers.schemas import (
    ANNOTATIONS,
    DEFINITIONS,
    FORMATS,
    IGNORED,
    LOOKS_LIKE,
    OF_OTHER_TYPES,
    TEXT_KEYWORDS,
    drop_ignored,
    escape_pattern,
    resolve,
    scalar_terminals,
    scan_pattern,
    standalone,
)

# Without this, a model may fill a call with spaces and line breaks until the token limit. A separator is a regular
# expression; it allows a space because models are trained to write JSON with one.
_COMPACT_JSON = {
    "whitespace_pattern": None,
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
_MAX_WORK = 32 * MAX_GRAMMAR_CHARS  # characters of schemas to inspect; a schema counts once per argument that uses it
_BLANKS = r"/[ \t\r\n]+/"
_BLANK = r"[\s\x1c-\x1f]*"


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
    """A tool that may be called, with the JSON schema of its parameters; references start at that schema's root."""

    name: str
    parameters: dict[str, Any]


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
        self._work = 0  # characters of schemas inspected so far
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
        return name

    def has(self, token: str) -> bool:
        """Return whether a special token decodes to this text."""
        return token in self._special

    def mark(self, text: str) -> str:
        """Return an expression for marks of the format, in which special tokens match as tokens and not as text."""
        return " ".join(self._pieces(text)) or '""'

    def _pieces(self, text: str) -> list[str]:
        parts = self._pattern.split(text)
        return [
            f"<[{self._special[part]}]>" if index % 2 else json.dumps(part) for index, part in enumerate(parts) if part
        ]

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

    def json(self, schema: Any, root: Any = None) -> str:
        """Return an expression for compact JSON of a schema, which may refer to other parts of `root`."""
        alone = drop_ignored(schema) if root is None else standalone(schema, root)
        text = GrammarSource.json_schema({"x-guidance": _COMPACT_JSON, **alone}).text
        self._look_for_tokens(alone)
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
            ArgumentError: Such a format cannot enforce the tool's parameters.
        """
        size = len(GrammarSource.json_schema(tool.parameters).text)  # this call also validates the schema
        self._look_for_tokens(tool.parameters)
        schema = resolve(tool.parameters, tool.parameters)
        known = ANNOTATIONS | IGNORED | {*DEFINITIONS, "type", "properties", "required", "additionalProperties"}
        if unknown := [keyword for keyword in schema if keyword not in known]:
            raise self.refuse(tool, f"{unknown[0]!r} at their top")
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if schema.get("type", "object") != "object" or not (
            isinstance(properties, dict)
            and isinstance(required, list)
            and all(isinstance(key, str) for key in required)
        ):
            raise self.refuse(tool, "another type than an object")
        # Each argument may copy the definitions of the whole schema.
        self._spend(tool, size * len({*properties, *required}))
        more = schema.get("additionalProperties", "properties" not in schema)
        for key in dict.fromkeys([*properties, *required]):
            if name.fullmatch(key) is None:
                raise self.refuse(tool, f"an argument called {key[:80]!r}")
            if (value := properties.get(key, schema.get("additionalProperties", True))) is not False:
                yield Argument(key, {} if value is True else value, key in required)
            elif key in required:
                raise self.refuse(tool, f"the argument {key!r}, which is required and may not be given")
        if more is not False:
            yield Argument(None, {} if more is True else more, False)

    def _look_for_tokens(self, schema: dict[str, Any]) -> None:
        self._spells = self._spells or self._pattern.search(json.dumps(schema, ensure_ascii=False)) is not None

    def _spend(self, tool: CalledTool, work: int) -> None:
        self._work += work
        if self._work > _MAX_WORK:
            raise ArgumentError(
                f"grammar: the parameters of {tool.name!r} have too many arguments or choices for calls of the "
                f"form {self._form!r}: offer fewer or smaller tools"
            )

    def free_name(self, tool: CalledTool) -> str:
        """Return a terminal for the name of an argument that a tool's parameters do not have."""
        taken = [key for key in resolve(tool.parameters, tool.parameters).get("properties", {}) if key]
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
        options = []
        types = schema_types(argument.schema, tool.parameters)
        head, *rest = self._pieces(end)
        # Without strings the value is JSON, which needs no exclusions.
        whole = bool(types) and "string" not in types
        branches = [argument.schema] if whole else self._branches(tool, argument.schema)
        scalars = [None if whole or schema.get("type") == "string" else scalar_terminals(schema) for schema in branches]
        # A number with a separate grammar would be lexed as the beginning of a string.
        own = [words for words, schema in zip(scalars, branches, strict=True) if schema.get("type") != "string"]
        numbers = ["/-?[0-9](?s:.*)/"] if None in own and types & {"integer", "number"} else []
        for schema, words in zip(branches, scalars, strict=True):
            if words is not None:
                parts, may_be_empty = [f"({' | '.join(words)})"], False
            elif whole or schema.get("type") != "string":
                options.append(" ".join([self.json(schema, tool.parameters), head, *rest]))
                continue
            else:
                # Readers leave out a line break at either end of a value.
                bare = [] if end.startswith("\n") else [r"/\n(?s:.*)/", r"/(?s:.*)\n/"]
                parts, may_be_empty = self._text(tool, schema, types, mark, bool(bare))
                looks = [f"/{_BLANK}{LOOKS_LIKE[kind]}{_BLANK}/" for kind in sorted(types - {"string"})]
                # A string that looks like another allowed type would be parsed as that type.
                if "enum" not in schema:
                    parts.append(_without(mark, others=[*bare, *looks, *numbers]))
            if head.startswith("<"):
                value = self.rule(" & ".join([*parts, "/(?s:.+)/"]), terminal=True)
                options.append(" ".join([f"{value}?" if may_be_empty else value, head, *rest]))
            else:  # one lexeme for value and end, since lexemes match greedily
                options.append(" ".join([self.rule(f"({' & '.join(parts)}) {head}", terminal=True), *rest]))
        if not options:
            raise self.refuse(tool, f"an argument {argument.name!r} that has no value")
        return f"({' | '.join(options)})"

    def _branches(self, tool: CalledTool, schema: Any, depth: int = 0) -> list[dict[str, Any]]:
        """Split a schema into alternatives that allow either strings or values of other types, not both."""
        self._spend(tool, _MAX_WORK >> 13)  # nested options could otherwise grow exponentially
        schema = resolve(schema, tool.parameters)
        for keyword in ("anyOf", "oneOf", "allOf"):
            if keyword in schema:
                others = [other for other in schema if other not in ANNOTATIONS and other != keyword]
                listed = schema[keyword]
                if (
                    others
                    or depth > 8
                    or not isinstance(listed, list)
                    or len(listed) > (1 if keyword == "allOf" else 64)
                ):
                    raise self.refuse(tool, f"{keyword!r} {f'with {others[0]!r} ' if others else ''}for a string")
                # `oneOf` forbids values that two options allow; a grammar cannot count, so options must have distinct
                # types.
                if keyword == "oneOf":
                    kinds = [kind for option in listed for kind in schema_types(option, tool.parameters) or {"string"}]
                    if len(kinds) > len({*kinds} - ({"integer"} if "number" in kinds else set())):
                        raise self.refuse(tool, "'oneOf' of options that may hold at once")
                return [branch for option in listed for branch in self._branches(tool, option, depth + 1)]
        declared = schema.get("type")
        listed = declared if isinstance(declared, list) else [declared] if declared is not None else []
        if declared == [] or not all(isinstance(kind, str) and kind in JSON_TYPES for kind in listed):
            raise self.refuse(tool, f"the type {str(declared)[:80]!r}")
        if "enum" in schema or "const" in schema:
            if ("enum" in schema and "const" in schema) or not isinstance(schema.get("enum", []), list):
                raise self.refuse(tool, "an 'enum' that is not a list or is combined with 'const'")
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            # Strings are written without quotes and other values as JSON, so they need separate branches.
            kinds = [kind for kind in listed if kind != "string"]
            texts = [value for value in values if isinstance(value, str) and (not listed or "string" in listed)]
            others = [value for value in values if not isinstance(value, str)] if kinds or not listed else []
            more = {keyword: value for keyword, value in schema.items() if keyword not in ("const", "enum")}
            of_texts = more | {"type": "string", "enum": texts}
            of_others = {"enum": others} | ({"type": kinds} if kinds else {})
        else:
            texts = [kind for kind in listed or ["string"] if kind == "string"]
            others = [kind for kind in listed if kind != "string"]
            of_texts, of_others = schema | {"type": "string"}, schema | {"type": others}
        if not texts and not others:
            raise self.refuse(tool, "an argument that has no value")
        return [*([of_texts] if texts else []), *([of_others] if others else [])]

    def _text(
        self, tool: CalledTool, schema: dict[str, Any], types: set[str], mark: str, bare: bool
    ) -> tuple[list[str], bool]:
        """Return the pattern that a string has to match, and whether it may be empty."""
        known = TEXT_KEYWORDS | ANNOTATIONS | OF_OTHER_TYPES | {*DEFINITIONS}
        if unknown := [keyword for keyword in schema if keyword not in known and not keyword.startswith("x-")]:
            raise self.refuse(tool, f"{unknown[0]!r} for a string")
        others = types - {"string"}
        parts = ["/(?s:.*)/"]
        least, most = schema.get("minLength", 0), schema.get("maxLength", MAX_GRAMMAR_CHARS)
        if not all(type(length) is int and length >= 0 for length in (least, most)) or least > most:
            raise self.refuse(tool, f"the lengths {str([least, most])[:80]} of a string")
        if least or "maxLength" in schema:
            parts.append(f"/(?s:.{{{least},{most if most < MAX_GRAMMAR_CHARS else ''}}})/")
        if "enum" in schema:
            if beside := [keyword for keyword in ("pattern", "format") if keyword in schema]:
                raise self.refuse(tool, f"{beside[0]!r} with the values of a string")
            # A value with the end mark in it would be cut there.
            texts = [text for text in schema["enum"] if mark not in text and not (bare and text != text.strip("\n"))]
            texts = [text for text in texts if not others or as_json(text.strip(), others) is None]
            if not (texts := [text for text in texts if least <= len(text) <= most]):
                raise self.refuse(
                    tool, "only values that are too long or short, or would be read as another type or cut"
                )
            return [f"({' | '.join(map(json.dumps, texts))})"], "" in texts
        if "pattern" in schema:
            parts.append(self._search(tool, schema["pattern"]))
        if "format" in schema:
            kind = schema["format"]
            if not isinstance(kind, str) or kind not in FORMATS:
                raise self.refuse(tool, f"the format {str(kind)[:80]!r} of a string")
            parts.append(f"/{escape_pattern(FORMATS[kind])}/")
        return parts, not (least or "pattern" in schema or "format" in schema)

    def _search(self, tool: CalledTool, pattern: Any) -> str:
        """Return a terminal for strings that contain a match of a pattern; `^` and `$` anchor it."""
        scanned = scan_pattern(pattern) if isinstance(pattern, str) else None
        if scanned is None:
            raise self.refuse(tool, f"the pattern {str(pattern)[:80]!r}")
        choice, ends = scanned
        begins = pattern.startswith("^")
        # An anchor would belong to one alternative only, which the rewritten pattern cannot express.
        if (begins or ends) and choice:
            raise self.refuse(tool, f"'^' or '$' with '|' in the pattern {pattern[:80]!r}")
        body = pattern[begins : len(pattern) - ends]
        # JSON Schema searches for a pattern anywhere; lexemes match as a whole.
        return f"/{'' if begins else '(?s:.*)'}({escape_pattern(body)}){'' if ends else '(?s:.*)'}/"


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
