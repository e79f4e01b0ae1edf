"""Grammars that a text must follow, compiled and followed by llguidance in processes of their own.

A grammar may come from anybody: what it may cost is bounded (`grammar_limits`), and it costs nobody but its own texts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from redrafter.grammar.process import GrammarProcess
from redrafter.grammar.source import GrammarSource, checked_text

__all__ = ["Grammar"]


class Grammar:
    """A grammar over one tokenizer's tokens. What it allows never changes, so any number of rows may share it.

    Raises `ArgumentError` where it is made: for what cannot be read, matches nothing, or is too large or too complex.
    """

    def __init__(self, source: str | GrammarSource, tokenizer: Any, process: GrammarProcess | None = None) -> None:
        """Compile a grammar.

        Args:
            source: in llguidance's own notation, or what the other constructors write.
            tokenizer: whose tokens the texts are of.
            process: a new process to compile in; None to start one.
        """
        self._source = (
            source if isinstance(source, GrammarSource) else GrammarSource("llguidance", checked_text(source))
        )
        self._tokenizer = tokenizer
        self._process = GrammarProcess(tokenizer) if process is None else process
        self._process.compile(self._source)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str, tokenizer: Any) -> "Grammar":
        """JSON that a schema allows; its keywords are those that llguidance knows, others are refused."""
        return cls(GrammarSource.json_schema(schema), tokenizer)

    @classmethod
    def json_object(cls, tokenizer: Any) -> "Grammar":
        """Any JSON object."""
        return cls(GrammarSource.of({"json_object": True}), tokenizer)

    @classmethod
    def regex(cls, pattern: str, tokenizer: Any) -> "Grammar":
        """What a regular expression matches as a whole; without look-around and back-references."""
        return cls(GrammarSource("regex", checked_text(pattern)), tokenizer)

    @classmethod
    def lark(cls, text: str, tokenizer: Any) -> "Grammar":
        """A context-free grammar in llguidance's variant of Lark; it begins at `start`."""
        return cls(GrammarSource("lark", checked_text(text)), tokenizer)

    @classmethod
    def ebnf(cls, text: str, tokenizer: Any) -> "Grammar":
        """A context-free grammar in GBNF, llama.cpp's notation; it begins at `root`."""
        return cls(GrammarSource("ebnf", checked_text(text)), tokenizer)

    @classmethod
    def choice(cls, texts: Sequence[str], tokenizer: Any) -> "Grammar":
        """One of a few texts."""
        return cls(GrammarSource.choice(texts), tokenizer)

    @classmethod
    def of(cls, spec: Mapping[str, Any] | str, tokenizer: Any) -> "Grammar":
        """Of `{"json_schema": ...}`, `{"json_object": true}`, `{"regex": ...}`, `{"lark": ...}`, `{"ebnf": ...}` or
        `{"choice": [...]}`, or of such a thing in JSON."""
        return cls(GrammarSource.of(spec), tokenizer)

    @property
    def process(self) -> GrammarProcess:
        """Return the process that follows the grammar's texts."""
        return self._process

    def restore(self) -> None:
        """Compile it again if its process has ended, for texts that are begun from now on."""
        if not self._process.alive:
            self._process = GrammarProcess(self._tokenizer)
            self._process.compile(self._source)
