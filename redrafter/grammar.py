"""Grammars that a text must follow, read by llguidance.

It is an optional dependency, and so imported late. A grammar may come from anybody: what it may cost is bounded.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary

from redrafter.errors import ArgumentError

__all__ = ["Grammar", "short"]

KINDS = ("json_schema", "json_object", "regex", "lark", "ebnf", "choice")
MOST_TEXT = 1 << 17  # characters of a grammar
MOST_RULES = 1000  # of an EBNF grammar, whose reader takes time that grows with their square
MOST_ITEMS = 20_000  # of the parser, for one mask; the time grows with their square, to 0.2 s
MOST_STATES = 60_000  # of the lexer, about 1 kB each
# Between the tokens of JSON, unless a schema's own "x-guidance" says otherwise. Bounded, or else a model that likes to
# indent may do so for ever.
WHITESPACE = r"( |\r?\n[ \t]{0,40})"
STACK = 512 << 20  # bytes; rules are followed by recursion, and MOST_TEXT has room for tens of thousands

_tokenizers: "WeakKeyDictionary[Any, Any]" = WeakKeyDictionary()
_lock = threading.Lock()


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ArgumentError("grammars need llguidance: pip install 'redrafter[guided]'") from error
    return llguidance


def _vocabulary(tokenizer: Any) -> Any:
    """llguidance's view of a tokenizer, made once."""
    _llguidance()
    from llguidance.hf import from_tokenizer

    with _lock:
        if tokenizer not in _tokenizers:
            try:
                _tokenizers[tokenizer] = from_tokenizer(tokenizer)
            except Exception as error:
                raise ArgumentError(
                    f"grammar: no grammar can be written with this tokenizer: {short(str(error))}"
                ) from error
        return _tokenizers[tokenizer]


class Grammar:
    """A grammar over one tokenizer's tokens. What it allows never changes, so any number of rows may share it.

    age: how often what its matchers share was made anew.

    Raises `ArgumentError` where it is made: for what cannot be read, matches nothing, or is too large or too complex.
    """

    def __init__(self, source: str, tokenizer: Any) -> None:
        """source: in llguidance's own notation, which the other constructors write."""
        self.vocabulary, self._source, self.age = _vocabulary(tokenizer), source, 0
        self._first = _in_deep_thread(self._compile)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str, tokenizer: Any) -> "Grammar":
        """JSON that a schema allows; its keywords are those that llguidance knows, others are refused."""
        try:
            text = _text(schema if isinstance(schema, str) else json.dumps(schema))
            source = _llguidance().LLMatcher.grammar_from_json_schema(text, {"whitespace_pattern": WHITESPACE})
        except ArgumentError:
            raise
        except (TypeError, ValueError, RecursionError) as error:
            raise _wrong(str(error)) from error
        return cls(source, tokenizer)

    @classmethod
    def json_object(cls, tokenizer: Any) -> "Grammar":
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, tokenizer)

    @classmethod
    def regex(cls, pattern: str, tokenizer: Any) -> "Grammar":
        """What a regular expression matches as a whole; without look-around and back-references."""
        return cls(_llguidance().LLMatcher.grammar_from_regex(_text(pattern)), tokenizer)

    @classmethod
    def lark(cls, text: str, tokenizer: Any) -> "Grammar":
        """A context-free grammar in llguidance's variant of Lark; it begins at `start`."""
        return cls(_llguidance().LLMatcher.grammar_from_lark(_text(text)), tokenizer)

    @classmethod
    def ebnf(cls, text: str, tokenizer: Any) -> "Grammar":
        """A context-free grammar in GBNF, llama.cpp's notation; it begins at `root`."""
        _llguidance()
        from llguidance.gbnf_to_lark import gbnf_to_lark

        if _text(text).count("::=") > MOST_RULES:
            raise ArgumentError(f"grammar: an EBNF grammar has at most {MOST_RULES} rules, this has more")
        try:
            lark = gbnf_to_lark(text)
        except Exception as error:  # its own class, and others where a text ends too early
            raise _wrong(str(error)) from error
        return cls.lark(lark, tokenizer)

    @classmethod
    def choice(cls, texts: Sequence[str], tokenizer: Any) -> "Grammar":
        """One of a few texts."""
        if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:
            raise ArgumentError(f"grammar: choice takes a list of texts, at least one, got {texts!r:.80}")
        return cls.lark("start: " + " | ".join(json.dumps(_text(text)) for text in texts), tokenizer)

    @classmethod
    def of(cls, spec: Mapping[str, Any] | str, tokenizer: Any) -> "Grammar":
        """Of `{"json_schema": ...}`, `{"json_object": true}`, `{"regex": ...}`, `{"lark": ...}`, `{"ebnf": ...}` or
        `{"choice": [...]}`, or of such a thing in JSON."""
        try:
            given = json.loads(spec) if isinstance(spec, str) else spec
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"grammar: not JSON: {short(str(error))}") from error
        if not isinstance(given, Mapping) or len(given) != 1 or next(iter(given)) not in KINDS:
            raise ArgumentError(f"grammar: one of {', '.join(KINDS)} and its value, got {spec!r:.80}")
        [(kind, value)] = given.items()
        if kind == "json_object":
            if value is not True:
                raise ArgumentError(f"grammar: json_object is true or left out, got {value!r:.80}")
            return cls.json_object(tokenizer)
        made: Grammar = getattr(cls, kind)(value, tokenizer)
        return made

    def start(self) -> Any:
        """A matcher of its own, that stands before the first token."""
        return self._first.deep_copy()

    def renew(self, age: int) -> None:
        """Forget what matchers of this age have learnt. They share the states of the lexer, which become more with
        every text until `MOST_STATES` stops them all."""
        if age == self.age:
            self._first, self.age = _in_deep_thread(self._compile), age + 1

    def _compile(self) -> Any:
        """With a first token and its masks: what is too large or matches nothing may show there and not before."""
        library = _llguidance()
        limits = library.LLParserLimits(step_max_items=MOST_ITEMS, max_lexer_states=MOST_STATES)
        first = library.LLMatcher(self.vocabulary, self._source, log_level=0, limits=limits)
        probe = first.deep_copy()
        for _ in range(2):
            mask = int.from_bytes(probe.compute_bitmask(), "little")
            if probe.is_error():
                raise _wrong(probe.get_error())
            if not mask:
                raise _wrong("no text of this vocabulary follows it")
            probe.try_consume_tokens([(mask & -mask).bit_length() - 1])
        return first


def _in_deep_thread(work: Callable[[], Any]) -> Any:
    """What `work` returns or raises, in a thread with a stack of `STACK` bytes."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    with _lock:  # the size is the whole process's
        before = threading.stack_size(STACK)
        try:
            thread = threading.Thread(target=run)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return result.result()


def _text(given: object) -> str:
    if not isinstance(given, str):
        raise ArgumentError(f"grammar: a text is needed, got {given!r:.80}")
    if len(given) > MOST_TEXT:
        raise ArgumentError(f"grammar: it has {len(given)} characters, {MOST_TEXT} are the most")
    return given


def _wrong(message: str) -> ArgumentError:
    return ArgumentError(f"grammar: {short(message)}")


def short(message: str) -> str:
    """llguidance's messages on one line, without the state that it prints behind them."""
    for mark in ("<state>", "<backtrace>"):
        message = message.split(mark)[0]
    return f"{' '.join(message.split()):.300}"
