"""Grammars as llguidance compiles them.

This runs in the process of a grammar (`redrafter.grammar.child`), where it may fail or be killed. It does not import
torch.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import llguidance

from redrafter.errors import ArgumentError
from redrafter.grammar import limits
from redrafter.grammar.source import GrammarSource

__all__ = ["CompiledGrammar", "one_line"]

# White space between the tokens of JSON, unless a schema's own "x-guidance" says otherwise. It is bounded, since a
# model that likes to indent might do so for ever.
WHITESPACE = r"( |\r?\n[ \t]{0,40})"


class CompiledGrammar:
    """A compiled grammar over one vocabulary, which any number of texts may follow.

    Attributes:
        vocabulary: llguidance's view of a tokenizer.
        age: How often the grammar has been compiled again.
    """

    def __init__(self, source: GrammarSource, vocabulary: Any, nice: int = 0) -> None:
        """Compile a grammar.

        Args:
            source: The grammar.
            vocabulary: llguidance's view of a tokenizer.
            nice: Niceness of the compilation.

        Raises:
            ArgumentError: The grammar cannot be read, matches no text, or is too large or too complex.
        """
        self.vocabulary, self.age = vocabulary, 0
        self._source = source
        self._first = run_in_deep_thread(self._compile, nice)

    def start(self) -> Any:
        """Return a new matcher at the beginning of a text."""
        return self._first.deep_copy()

    def renew(self, age: int) -> None:
        """Compile the grammar again, unless that was done since matchers of age `age` were made.

        All matchers of one age share the states of a lexer. Every text adds some, until `MAX_LEXER_STATES` stops all
        texts.
        """
        if age == self.age:
            self._first, self.age = run_in_deep_thread(self._compile), age + 1

    def _compile(self) -> Any:
        """Return a matcher at the beginning of a text.

        A first token is tried, since a grammar that is too large or matches nothing may fail only there.
        """
        parser_limits = llguidance.LLParserLimits(
            step_max_items=limits.MAX_PARSER_ITEMS, max_lexer_states=limits.MAX_LEXER_STATES
        )
        first = llguidance.LLMatcher(self.vocabulary, _to_llguidance(self._source), log_level=0, limits=parser_limits)
        probe = first.deep_copy()
        for _ in range(2):
            mask = int.from_bytes(probe.compute_bitmask(), "little")
            if probe.is_error():
                raise _error(probe.get_error())
            if not mask:
                raise _error("no text of this vocabulary follows it")
            probe.try_consume_tokens([(mask & -mask).bit_length() - 1])
        return first


def _to_llguidance(source: GrammarSource) -> str:
    """Return the grammar in the notation that llguidance reads."""
    kind, text = source
    try:
        if kind == "json_schema":
            return llguidance.LLMatcher.grammar_from_json_schema(text, {"whitespace_pattern": WHITESPACE})
    except ValueError as error:
        raise _error(str(error)) from error
    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(text)
    if kind == "ebnf":
        text = _ebnf_to_lark(text)
    return text if kind == "llguidance" else llguidance.LLMatcher.grammar_from_lark(text)


def _ebnf_to_lark(text: str) -> str:
    """Translate llama.cpp's notation into Lark."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if text.count("::=") > limits.MAX_EBNF_RULES:
        raise ArgumentError(f"grammar: an EBNF grammar has at most {limits.MAX_EBNF_RULES} rules, this has more")
    try:
        lark = gbnf_to_lark(text)
    except Exception as error:  # its own class of errors, and others where a grammar ends too early
        raise _error(str(error)) from error
    if len(lark) > limits.MAX_GRAMMAR_CHARS:
        raise _error(f"it has {len(lark)} characters in Lark, {limits.MAX_GRAMMAR_CHARS} are the most")
    return lark


def run_in_deep_thread(work: Callable[[], Any], nice: int = 0) -> Any:
    """Call a function in a thread with a stack of `STACK_BYTES` bytes; return what it returns, raise what it raises.

    Args:
        work: The function to call.
        nice: Niceness to add; on Linux, to that thread alone.
    """
    result: Future[Any] = Future()

    def run() -> None:
        try:
            os.nice(nice)
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    before = threading.stack_size(limits.STACK_BYTES)
    try:
        thread = threading.Thread(target=run)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    return result.result()


def _error(message: str) -> ArgumentError:
    """Make an error of a message of llguidance's."""
    return ArgumentError(f"grammar: {one_line(message)}")


def one_line(message: str) -> str:
    """Return a message of llguidance's on one line, without the state that it prints after it."""
    for mark in ("<state>", "<backtrace>"):
        message = message.split(mark)[0]
    return f"{' '.join(message.split()):.300}"
