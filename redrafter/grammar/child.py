"""The process of one grammar: it compiles the grammar, then computes masks for the texts that follow it.

`redrafter.sandbox.child` forks it, and it ends when the other end of its connection is closed. A grammar can harm no
other process: the kernel limits memory and time, and ends this process at the limit.
"""

import json
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import llguidance

from redrafter.errors import ArgumentError
from redrafter.grammar import limits
from redrafter.grammar.source import GrammarSource
from redrafter.sandbox.child import bounded_work, limit_memory, memory

# White space between the tokens of JSON, unless a schema's own "x-guidance" overrides it. It is bounded, since a model
# may indent forever otherwise.
WHITESPACE = r"( |\r?\n[ \t]{0,40})"
_LISTED_LINES = re.compile(r"\n\s*\d+ \| ")
# llguidance's names for the error that no token may follow, as in `start: start`, a rule that only refers to itself.
_DEAD_ENDS = ("NoExtension", "NoExtensionBias")
_NO_TEXT = "no text of this vocabulary follows it"
_POSITION_OF_SCHEMA = re.compile(r"at \d+\(\d+\): (?=failed to compile JSON schema)")


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

    def _compile(self) -> object:
        """Return a matcher at the beginning of a text.

        A first token is tried, since a grammar that is too large or matches nothing may fail only there.
        """
        parser_limits = llguidance.LLParserLimits(
            step_max_items=limits.MAX_PARSER_ITEMS, max_lexer_states=limits.MAX_LEXER_STATES
        )
        first = llguidance.LLMatcher(self.vocabulary, _to_llguidance(self._source), log_level=0, limits=parser_limits)
        probe = first.deep_copy()
        # Two tokens: some limits are exceeded only after the first one.
        for _ in range(2):
            mask = int.from_bytes(probe.compute_bitmask(), "little")
            if probe.is_error():
                raise _error(probe.get_error())
            if not mask:
                raise _error(_NO_TEXT)
            # The lowest allowed id.
            probe.try_consume_tokens([(mask & -mask).bit_length() - 1])
        return first


def _to_llguidance(source: GrammarSource) -> str:
    if source.around:
        text = _to_llguidance(source._replace(around=""))
        parts = [{"lark_grammar": text}] if source.kind in ("lark", "ebnf") else json.loads(text)["grammars"]
        return json.dumps({"grammars": [{"lark_grammar": source.around}, parts[0] | {"name": "answer"}, *parts[1:]]})
    kind, text, _ = source
    try:
        if kind == "json_schema":
            return llguidance.LLMatcher.grammar_from_json_schema(text, {"whitespace_pattern": WHITESPACE})
    except ValueError as error:
        raise _error(str(error)) from error
    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(text)
    if kind == "ebnf":
        text = _ebnf_to_lark(text)
    return llguidance.LLMatcher.grammar_from_lark(text)


def _ebnf_to_lark(text: str) -> str:
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


def run_in_deep_thread(work: Callable[[], object], nice: int = 0) -> Any:
    """Call a function in a thread with a stack of `STACK_BYTES` bytes; return its result or raise its exception.

    `nice` is added to the niceness, on Linux to that thread's alone.
    """
    before = threading.stack_size(limits.STACK_BYTES)
    try:
        with ThreadPoolExecutor(1, initializer=os.nice, initargs=(nice,)) as thread:
            return thread.submit(work).result()
    finally:
        threading.stack_size(before)


def _error(message: str) -> ArgumentError:
    return ArgumentError(f"grammar: {one_line(message)}")


def one_line(message: str) -> str:
    """Return a message of llguidance's on one line, without the state and the lines of the grammar that it prints.

    A server writes the grammars of calls itself, so its clients know no lines of them.
    """
    for mark in ("<state>", "<backtrace>"):
        message = message.split(mark)[0]
    message = _POSITION_OF_SCHEMA.sub("", _LISTED_LINES.split(message)[0])
    if message.strip() in _DEAD_ENDS:
        return _NO_TEXT
    return f"{' '.join(message.split()):.300}"


class GrammarState:
    """The state of one text that follows a grammar.

    Attributes:
        grammar: The grammar.
        ends: Ids that end the text.
        text: The tokens of the text.
        matcher: llguidance's matcher, which has consumed the text up to its end, and drafts while masks are computed.
        ended: Whether the text contains an end token.
        error: Why the grammar was given up, on one line; from then on only an end is allowed. None without an error.
    """

    def __init__(self, grammar: CompiledGrammar, ends: Collection[int]) -> None:
        """Begin an empty text; its `ends` are allowed where the grammar may end, and required where it must."""
        self.grammar, self.ends = grammar, frozenset(ends)
        self._stops = self.ends | set(grammar.vocabulary.eos_tokens)  # in no text of the grammar
        self._empty_mask = bytes(4 * -(-max(grammar.vocabulary.vocab_size, max(ends) + 1) // 32))
        self._ends_mask = self._with_ends(bytearray(self._empty_mask))
        self.text: list[int]
        self._consumed: list[int]  # tokens that the matcher has consumed
        self.ended: bool
        self.error: str | None
        self._cpu_seconds = 0.0  # spent on this text
        self._restart()

    def advance(self, text: Sequence[int]) -> None:
        """Move to the end of `text`, all tokens generated so far, which usually continues the known text."""
        begun = time.process_time() - self._cpu_seconds
        text = list(text)
        if text[: len(self.text)] != self.text:
            self._restart()
        new, self.text = text[len(self.text) :], text
        if self.ended or self.error is not None:
            return
        stop = next((index for index, token in enumerate(new) if token in self._stops), len(new))
        self.ended = stop < len(new)
        self._consume(new[:stop])
        self._cpu_seconds = time.process_time() - begun

    def masks(self, tokens: Sequence[int], parents: Sequence[int], levels: int) -> dict[int, bytes]:
        """Return the mask of allowed next tokens at each node of a tree that the grammar allows.

        A mask has a bit for each token id. Nodes that the grammar does not allow have none.

        Args:
            tokens: Tokens of the tree; the root is the last token of the text.
            parents: Index of each node's parent, which comes before it.
            levels: How many levels of the tree to look at.
        """
        begun = time.process_time() - self._cpu_seconds
        children: list[list[int]] = [[] for _ in tokens]
        # In descending order, so that children are visited in ascending order from the stack.
        for node in range(len(tokens) - 1, 0, -1):
            children[parents[node]].append(node)
        masks: dict[int, bytes] = {}
        text_length = len(self._consumed)
        todo = [] if self.ended else [(0, 0)]  # nodes and their depth
        while todo:
            node, depth = todo.pop()
            token = tokens[node]
            if depth and self.error is None:
                mask = masks[parents[node]]
                # A node that its parent's mask forbids needs no mask: it cannot be drawn.
                allowed = token >> 3 < len(mask) and mask[token >> 3] >> (token & 7) & 1
                if token in self._stops or not allowed:
                    continue
                # Nodes are visited depth first, so the matcher returns only to the parent.
                self._roll_back(text_length + depth - 1)
                self._consume([token])
            masks[node] = self._mask()
            self._cpu_seconds = time.process_time() - begun
            if (
                self._cpu_seconds > limits.MASK_CPU_SECONDS + limits.MASK_CPU_SECONDS_PER_TOKEN * len(self.text)
                and self.error is None
            ):
                self._give_up(f"its masks took {self._cpu_seconds:.1f} s")
            if depth + 1 < levels:
                todo += [(child, depth + 1) for child in children[node]]
        if self.error is None:
            self._roll_back(text_length)
        return masks

    def _restart(self) -> None:
        self.matcher, self._age = self.grammar.start(), self.grammar.age
        self.text, self._consumed, self.ended, self.error = [], [], False, None

    def _consume(self, tokens: list[int]) -> None:
        self._consumed += tokens
        if self.matcher.try_consume_tokens(tokens) < len(tokens):
            self._renew()

    def _renew(self, recompile: bool = False) -> None:
        # Some of llguidance's limits count everything that a matcher ever did, including rejected drafts: a new one has
        # consumed only this text. Others count what all texts of the compiled grammar did.
        if recompile:
            self.grammar.renew(self._age)
        self.matcher, self._age = self.grammar.start(), self.grammar.age
        if self.matcher.try_consume_tokens(self._consumed) < len(self._consumed):
            self.matcher.compute_bitmask()  # sets the error
            if self.matcher.is_error() and not recompile:
                return self._renew(recompile=True)
            self._give_up("it does not allow what was written")

    def _give_up(self, otherwise: str) -> None:
        why = one_line(self.matcher.get_error()) or otherwise
        self.error = f"grammar: given up after {len(self._consumed)} tokens: {why}"

    def _roll_back(self, length: int) -> None:
        if len(self._consumed) > length:
            self.matcher.rollback(len(self._consumed) - length)
            del self._consumed[length:]

    def _mask(self) -> bytes:
        mask = self._compute_mask()
        if mask is None:
            self._renew()
            mask = self._compute_mask()
        if mask is None and self.matcher.is_error():
            self._renew(recompile=True)
            mask = self._compute_mask()
        if mask is None:
            self._give_up("no token of the vocabulary may follow")
        return mask or self._ends_mask

    def _compute_mask(self) -> bytes | None:
        # None if the matcher fails, or allows no token after a text that is not complete.
        if self.error is not None:
            return self._ends_mask
        size = len(self._empty_mask)
        mask = bytearray(self.matcher.compute_bitmask()[:size].ljust(size, b"\0"))
        if self.matcher.is_error():
            return None
        # An end token that the grammar itself names would end the text before the grammar does.
        for token in self._stops:
            mask[token >> 3] &= ~(1 << (token & 7))
        if self.matcher.is_accepting():
            return self._with_ends(mask)
        return None if mask == self._empty_mask else bytes(mask)

    def _with_ends(self, mask: bytearray) -> bytes:
        for token in self.ends:
            mask[token >> 3] |= 1 << (token & 7)
        return bytes(mask)


COMPILE_NICENESS = 10  # of a compilation, so that texts being generated have precedence


def prepare(end: int | None, tokenizer: str) -> Callable[[Connection], None]:
    """Read a tokenizer, and return the main function of a process for one grammar over its vocabulary.

    Args:
        end: Id of the tokenizer's EOS token; None if it has none.
        tokenizer: The tokenizer as `tokenizers` writes it to a file.
    """
    description = json.loads(tokenizer) | {"padding": None, "truncation": None}
    vocabulary = llguidance.LLTokenizer(json.dumps(description, ensure_ascii=False), eos_token=end)
    return lambda connection: _follow(connection, vocabulary)


def _follow(connection: Connection, vocabulary: object) -> None:
    """Compile the grammar that is sent, then answer questions about its texts until the connection is closed.

    The first message is `+` and the size of the compiled grammar in bytes, or `-` and an error message. Then come the
    numbers of texts to be dropped, and questions. A question is a text's number, the ids that end it, how many of the
    tokens sent before are still part of it, the tokens after those up to the root of a tree, the tree's tokens, the
    index of each one's parent, and how many levels need masks. The answers are a message of JSON, with whether each
    text has ended, its error, the nodes that its grammar allows and the size of their masks; and one of all masks.
    """
    held = memory()[1]
    # Before any input of a client is read, so that its grammar is parsed within the limit too.
    limit_memory(limits.MAX_PROCESS_BYTES)
    source = GrammarSource(*connection.recv())
    try:
        with bounded_work(limits.COMPILE_CPU_SECONDS):
            grammar = CompiledGrammar(source, vocabulary, COMPILE_NICENESS)
    except ArgumentError as error:
        return connection.send_bytes(f"-{error}".encode(errors="replace"))
    connection.send_bytes(b"+%d" % (memory()[1] - held))
    states: dict[int, GrammarState] = {}
    while True:
        forgotten, questions = connection.recv()
        for text in forgotten:
            states.pop(text, None)
        heads: list[object] = []
        bits: list[bytes] = []
        with bounded_work(limits.step_cpu_seconds(len(questions))):
            for number, ends, known, new, tokens, parents, levels in questions:
                if number not in states:
                    states[number] = GrammarState(grammar, ends)
                state = states[number]
                # A mismatch means a lost message: no answer is better than one for another text.
                if known > len(state.text):
                    raise EOFError("the program refers to tokens that it has not sent")
                state.advance([*state.text[:known], *new])
                masks = state.masks(tokens, parents, levels)
                heads.append((state.ended, state.error, list(masks), len(next(iter(masks.values()), b""))))
                bits += masks.values()
        connection.send_bytes(json.dumps(heads).encode())
        connection.send_bytes(b"".join(bits))
