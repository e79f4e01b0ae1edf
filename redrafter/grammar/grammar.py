"""Grammars for guided decoding: the public class, the process of each grammar, and the texts that follow it.

llguidance compiles and follows each grammar in a process of its own. A grammar may come from anybody: its cost is
bounded (`redrafter.grammar.limits`), and only its own texts pay it.
"""

import json
import pickle
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from redrafter.errors import ArgumentError, MissingDependencyError, how_to_install
from redrafter.grammar.limits import COMPILE_CPU_SECONDS, COMPILE_WAIT_SECONDS, MAX_PROCESS_BYTES, step_cpu_seconds
from redrafter.grammar.source import GrammarSource
from redrafter.sandbox.process import ForkServer, NotPreparedError, SandboxedProcess, server_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # takes seconds to import, and processes of grammars need none

ANSWER_SLACK_SECONDS = 5.0  # wall-clock time that a process may wait for a processor

_text_numbers = count()
_asking = threading.Lock()  # held from questions to their answers, which come in the same order

Masks = Mapping[int, bytes | memoryview]  # by node, a bit for each token id that may follow
Question = tuple[int, list[int], int, list[int], list[int], list[int], int]  # as `redrafter.grammar.child` takes it
Answer = tuple[bool, str | None, Masks]  # whether the text has ended, why it was given up, and the masks


class GrammarProcess(SandboxedProcess):
    """A process that compiles one grammar and follows its texts. It ends with this object, or by `end`.

    Attributes:
        memory: Bytes that the compiled grammar takes.
        forgotten: Numbers of dropped texts, which the next question reports to the process.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Fork a process from the tokenizer's server, which is started if there is none.

        Raises:
            MissingDependencyError: llguidance is not installed, or the system is Windows.
            ArgumentError: llguidance cannot read the tokenizer.
            ReDrafterError: No process can be started.
        """
        super().__init__(lambda: server_for(tokenizer))
        self.memory, self.forgotten = 0, deque[int]()

    def compile(self, source: GrammarSource) -> None:
        """Let the process compile a grammar, and wait for it.

        Raises:
            ArgumentError: The grammar cannot be compiled.
        """
        try:
            self.connection.send(tuple(source))
            reply = self.receive(COMPILE_WAIT_SECONDS)
        except (EOFError, OSError) as error:
            self.end()
            raise ArgumentError(
                "grammar: too complex: its compilation was given up; it may take "
                f"{COMPILE_CPU_SECONDS} s of a processor, {COMPILE_WAIT_SECONDS} s in all, and "
                f"{MAX_PROCESS_BYTES >> 20} MB of memory"
            ) from error
        if reply[:1] != b"+":
            self.end()
            raise ArgumentError(reply[1:].decode())
        self.memory = max(int(reply[1:]), 0)

    def ask(self, questions: Sequence[Question]) -> None:
        """Send questions, whose answers must be received before others are sent."""
        # Popped one by one: other threads append.
        forgotten = [self.forgotten.popleft() for _ in range(len(self.forgotten))]
        with suppress(OSError):  # the process has ended, which `answers` reports
            self.connection.send_bytes(pickle.dumps((forgotten, questions)))  # `send` takes twice as long

    def answers(self, count: int) -> list[Answer] | None:
        """Receive the answers to `count` questions; None if the process has ended or took too long."""
        # Twice the processor time, as the process may share a core.
        seconds = ANSWER_SLACK_SECONDS + 2 * step_cpu_seconds(count)
        try:
            heads, bits = json.loads(self.receive(seconds)), memoryview(self.receive(seconds))
        except (EOFError, OSError):
            self.end()
            return None
        answers: list[Answer] = []
        for ended, error, nodes, width in heads:
            masks = {node: bits[index * width : (index + 1) * width] for index, node in enumerate(nodes)}
            answers.append((ended, error, masks))
            bits = bits[len(nodes) * width :]
        return answers


def server_for(tokenizer: "PreTrainedTokenizerBase") -> ForkServer:
    """Return the fork server of a tokenizer, a new one if there is none or it has died."""
    if sys.platform == "win32":
        raise MissingDependencyError("grammars need Unix sockets, which Windows lacks: use Linux or macOS")
    if find_spec("llguidance") is None:
        raise MissingDependencyError(f"grammars need llguidance: {how_to_install('guided')}")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _unreadable("only fast tokenizers are supported")
    try:
        return server_of(
            tokenizer, lambda: ForkServer("redrafter.grammar.child", tokenizer.eos_token_id, backend.to_str())
        )
    except NotPreparedError as error:
        raise _unreadable(str(error)) from error


def _unreadable(why: str) -> ArgumentError:
    return ArgumentError(f"grammar: this tokenizer cannot be used for grammars: {' '.join(why.split()):.300}")


class Grammar:
    """A grammar that generated texts must follow, over the tokens of one tokenizer.

    It never changes, so any number of rows may share it.

    Attributes:
        source: The grammar's notation and text.
        process: The process that follows its texts; None where rank 0 follows them for this rank.
    """

    process: GrammarProcess | None

    def __init__(
        self,
        spec: Mapping[str, object] | str | GrammarSource,
        tokenizer: "PreTrainedTokenizerBase",
        process: GrammarProcess | None = None,
    ) -> None:
        """Compile a grammar.

        Args:
            spec: `{"json_schema": ...}`, `{"json_object": true}`, `{"regex": ...}`, `{"lark": ...}`, `{"ebnf": ...}` or
                `{"choice": [...]}`, or one of these as JSON, or a `GrammarSource`.
            tokenizer: The tokenizer of the texts; a fast one.
            process: A new process to compile in; None to start one.

        Raises:
            ArgumentError: The grammar cannot be read, matches no text, or is too large or too complex.
        """
        self.source = spec if isinstance(spec, GrammarSource) else GrammarSource.from_spec(spec)
        self._tokenizer = tokenizer
        self._compile(GrammarProcess(tokenizer) if process is None else process)

    @classmethod
    def of_first_rank(cls, source: GrammarSource) -> "Grammar":
        """Return a grammar that rank 0 follows for this rank, where it forbids nothing: draws are rank 0's."""
        grammar = cls.__new__(cls)
        grammar.source, grammar.process = source, None
        return grammar

    @property
    def alive(self) -> bool:
        """Return whether its process can follow texts."""
        return self.process is not None and self.process.alive

    @property
    def memory(self) -> int:
        """Bytes that it takes in its process."""
        return 0 if self.process is None else self.process.memory

    def restore(self) -> None:
        """Compile the grammar again if its process has ended, for texts that begin later."""
        if not self.alive:
            self._compile(GrammarProcess(self._tokenizer))

    def _compile(self, process: GrammarProcess) -> None:
        self.process = process
        process.compile(self.source)


class TextTree(NamedTuple):
    """A text and the tree of drafts that may follow it.

    Attributes:
        text: All tokens generated so far.
        tokens: Tokens of the tree, beginning with the root, which is the last token of the text.
        parents: Index of each node's parent.
        levels: Number of levels of the tree that need masks.
    """

    text: list[int]
    tokens: list[int]
    parents: list[int]
    levels: int


class GuidedText:
    """One text that follows a grammar.

    Attributes:
        ends: Ids that end the text, in ascending order.
        process: The process of the grammar; None where rank 0 asks it.
        number: The text's number in the grammar's process.
        ended: Whether the text contains an end token.
        error: Why the grammar was given up, on one line; from then on only an end is allowed. None without an error.
    """

    def __init__(self, grammar: Grammar, ends: Collection[int]) -> None:
        """Begin an empty text; its `ends` are allowed where the grammar may end, and required where it must."""
        self.ends = sorted({token for token in ends if token >= 0})
        if not self.ends:
            raise ArgumentError("a grammar needs a token that ends the text: give eos_token_id")
        self.process = grammar.process
        self.ended = False
        self.error: str | None = None
        # Unique in the program, as texts of several engines may share a process.
        self.number = next(_text_numbers) & 0x7FFFFFFF
        self._sent: list[int] = []
        self._asked = False

    def __del__(self) -> None:
        if getattr(self, "_asked", False) and self.process is not None:
            self.process.forgotten.append(self.number)

    def question(self, tree: TextTree) -> Question:
        """Return the question for the masks of a tree, with the part of the text that is new to the process.

        It must be sent, as later questions assume that the process knows the whole text.
        """
        # A preempted sequence may have been drawn differently, so the text is sent again from the start.
        if tree.text[: len(self._sent)] != self._sent:
            self._sent = []
        known, self._asked = len(self._sent), True
        new = tree.text[known:]
        self._sent += new
        return self.number, self.ends, known, new, tree.tokens, tree.parents, tree.levels

    def read_answer(self, answer: Answer | None, nodes: int) -> Masks:
        """Update the text from an answer, and return its masks.

        Args:
            answer: The answer; None if the process has ended, which is an error of the text: then only an end is
                allowed at all nodes.
            nodes: Nodes of the tree.
        """
        if answer is not None:
            self.ended, self.error, masks = answer
            return masks
        if self.error is None:
            self.error = (
                f"grammar: given up after {len(self._sent)} tokens: its process has ended, as when a step takes "
                "too long or too much memory"
            )
        mask = sum(1 << token for token in self.ends).to_bytes(self.ends[-1] // 8 + 1, "little")
        return dict.fromkeys(range(nodes), mask)


def compute_masks(requests: Sequence[tuple[GuidedText, TextTree]]) -> list[Masks]:
    """Return the masks of allowed next tokens for several texts, at the nodes that their grammars allow.

    All processes receive their questions before any answer is awaited, so they work in parallel.
    """
    groups: defaultdict[GrammarProcess, list[int]] = defaultdict(list)
    for index, (text, _) in enumerate(requests):
        assert text.process is not None, "rank 0 asks"
        groups[text.process].append(index)
    masks: list[Masks] = [{}] * len(requests)
    with _asking:
        try:
            for process, indices in groups.items():
                process.ask([text.question(tree) for text, tree in map(requests.__getitem__, indices)])
            for process, indices in groups.items():
                answers: Sequence[Answer | None] = process.answers(len(indices)) or [None] * len(indices)
                for index, answer in zip(indices, answers, strict=True):
                    text, tree = requests[index]
                    masks[index] = text.read_answer(answer, len(tree.tokens))
        except BaseException:  # such as Ctrl-C: an answer that was not read would be taken for a later one
            for process in groups:
                process.end()
            raise
    return masks
