"""Grammars that llguidance has compiled.

This runs in the process of a grammar (`grammar_child`), where it may fail or be killed; it knows no torch.
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

# Between the tokens of JSON, unless a schema's own "x-guidance" says otherwise. Bounded, or else a model that likes to
# indent may do so for ever.
WHITESPACE = r"( |\r?\n[ \t]{0,40})"


class CompiledGrammar:
    """A grammar over one vocabulary. Any number of texts may follow it.

    Raises `ArgumentError` where it is made: for what cannot be read, matches nothing, or is too large or too complex.

    Attributes:
        vocabulary: llguidance's view of a tokenizer.
        age: how often what its matchers share was made anew.
    """

    def __init__(self, source: GrammarSource, vocabulary: Any, nice: int = 0) -> None:
        self.vocabulary, self.age = vocabulary, 0
        self._source = source
        self._first = run_in_deep_thread(self._compile, nice)

    def start(self) -> Any:
        """Return a matcher of its own, that stands before the first token."""
        return self._first.deep_copy()

    def renew(self, age: int) -> None:
        """Forget what matchers of this age have learnt. They share the states of the lexer, which become more with
        every text until `MAX_LEXER_STATES` stops them all."""
        if age == self.age:
            self._first, self.age = run_in_deep_thread(self._compile), age + 1

    def _compile(self) -> Any:
        """With a first token and its masks: what is too large or matches nothing may show there and not before."""
        most = llguidance.LLParserLimits(
            step_max_items=limits.MAX_PARSER_ITEMS, max_lexer_states=limits.MAX_LEXER_STATES
        )
        first = llguidance.LLMatcher(self.vocabulary, _in_own_notation(self._source), log_level=0, limits=most)
        probe = first.deep_copy()
        for _ in range(2):
            mask = int.from_bytes(probe.compute_bitmask(), "little")
            if probe.is_error():
                raise _wrong(probe.get_error())
            if not mask:
                raise _wrong("no text of this vocabulary follows it")
            probe.try_consume_tokens([(mask & -mask).bit_length() - 1])
        return first


def _in_own_notation(source: GrammarSource) -> str:
    """Write a source as llguidance reads it."""
    kind, text = source
    try:
        if kind == "json_schema":
            return llguidance.LLMatcher.grammar_from_json_schema(text, {"whitespace_pattern": WHITESPACE})
    except ValueError as error:
        raise _wrong(str(error)) from error
    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(text)
    if kind == "ebnf":
        text = _lark_of_ebnf(text)
    return text if kind == "llguidance" else llguidance.LLMatcher.grammar_from_lark(text)


def _lark_of_ebnf(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if text.count("::=") > limits.MAX_EBNF_RULES:
        raise ArgumentError(f"grammar: an EBNF grammar has at most {limits.MAX_EBNF_RULES} rules, this has more")
    try:
        lark = gbnf_to_lark(text)
    except Exception as error:  # its own class, and others where a text ends too early
        raise _wrong(str(error)) from error
    if len(lark) > limits.MAX_GRAMMAR_CHARS:
        raise _wrong(f"it has {len(lark)} characters in Lark, {limits.MAX_GRAMMAR_CHARS} are the most")
    return lark


def run_in_deep_thread(work: Callable[[], Any], nice: int = 0) -> Any:
    """Return what `work` returns, or raise what it raises, in a thread with a stack of `STACK_BYTES` bytes.

    Args:
        work: the function to call.
        nice: how far to stand back behind others; on Linux this holds for the thread alone.
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


def _wrong(message: str) -> ArgumentError:
    return ArgumentError(f"grammar: {one_line(message)}")


def one_line(message: str) -> str:
    """Return llguidance's message on one line, without the state that it prints behind it."""
    for mark in ("<state>", "<backtrace>"):
        message = message.split(mark)[0]
    return f"{' '.join(message.split()):.300}"
