"""Grammars for guided decoding, the public class.

llguidance compiles and follows each grammar in a process of its own. A grammar may come from anybody: its cost is
bounded (`redrafter.grammar.limits`), and only its own texts pay it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from redrafter.grammar.process import GrammarProcess
from redrafter.grammar.source import GrammarSource, checked_text

__all__ = ["Grammar"]


class Grammar:
    """A grammar that generated texts must follow, over the tokens of one tokenizer.

    It never changes, so any number of rows may share it. All constructors raise `ArgumentError` for a grammar that
    cannot be read, matches no text, or is too large or too complex.
    """

    def __init__(self, source: str | GrammarSource, tokenizer: Any, process: GrammarProcess | None = None) -> None:
        """Compile a grammar.

        Args:
            source: The grammar in llguidance's own notation, or a `GrammarSource` in any notation.
            tokenizer: The tokenizer of the texts; a fast one.
            process: A new process to compile in; None to start one.
        """
        self._source = (
            source if isinstance(source, GrammarSource) else GrammarSource("llguidance", checked_text(source))
        )
        self._tokenizer = tokenizer
        self._process = GrammarProcess(tokenizer) if process is None else process
        self._process.compile(self._source)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str, tokenizer: Any) -> "Grammar":
        """Allow JSON that a schema describes; keywords that llguidance does not know are refused."""
        return cls(GrammarSource.json_schema(schema), tokenizer)

    @classmethod
    def json_object(cls, tokenizer: Any) -> "Grammar":
        """Allow any JSON object."""
        return cls(GrammarSource.of({"json_object": True}), tokenizer)

    @classmethod
    def regex(cls, pattern: str, tokenizer: Any) -> "Grammar":
        """Allow texts that a regular expression matches as a whole; it has no look-around and no back-references."""
        return cls(GrammarSource("regex", checked_text(pattern)), tokenizer)

    @classmethod
    def lark(cls, text: str, tokenizer: Any) -> "Grammar":
        """Allow the texts of a context-free grammar in llguidance's variant of Lark, which begins at `start`."""
        return cls(GrammarSource("lark", checked_text(text)), tokenizer)

    @classmethod
    def ebnf(cls, text: str, tokenizer: Any) -> "Grammar":
        """Allow the texts of a context-free grammar in GBNF, llama.cpp's notation, which begins at `root`."""
        return cls(GrammarSource("ebnf", checked_text(text)), tokenizer)

    @classmethod
    def choice(cls, texts: Sequence[str], tokenizer: Any) -> "Grammar":
        """Allow one of several texts."""
        return cls(GrammarSource.choice(texts), tokenizer)

    @classmethod
    def of(cls, spec: Mapping[str, Any] | str, tokenizer: Any) -> "Grammar":
        """Make a grammar of any kind.

        Args:
            spec: `{"json_schema": ...}`, `{"json_object": true}`, `{"regex": ...}`, `{"lark": ...}`, `{"ebnf": ...}` or
                `{"choice": [...]}`, or one of these as JSON.
            tokenizer: The tokenizer of the texts; a fast one.
        """
        return cls(GrammarSource.of(spec), tokenizer)

    @property
    def process(self) -> GrammarProcess:
        """The process that follows the grammar's texts."""
        return self._process

    @property
    def source(self) -> GrammarSource:
        """The grammar's notation and text."""
        return self._source

    def restore(self) -> None:
        """Compile the grammar again if its process has ended, for texts that begin from now on."""
        if not self._process.alive:
            self._process = GrammarProcess(self._tokenizer)
            self._process.compile(self._source)
