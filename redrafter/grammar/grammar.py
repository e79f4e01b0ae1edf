"""Grammars for guided decoding: the public class, the process of each grammar, and the texts that follow it.

llguidance compiles and follows each grammar in a process of its own. A grammar may come from anybody: its cost is
bounded (`redrafter.grammar.limits`), and only its own texts pay it.
"""

import json
import sys
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from redrafter.errors import ArgumentError, MissingDependencyError, how_to_install
from redrafter.grammar.limits import COMPILE_CPU_SECONDS, COMPILE_WAIT_SECONDS, MAX_PROCESS_BYTES, step_cpu_seconds
from redrafter.grammar.source import GrammarSource, checked_text
from redrafter.sandbox.frames import receive_frame, send_frame
from redrafter.sandbox.process import NotPreparedError, SandboxedProcess, Zygote, zygote_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # takes seconds to import, and processes of grammars need none

ANSWER_SLACK_SECONDS = 5.0  # wall-clock time that a process may wait for a processor

_process_numbers, _text_numbers = count(), count()

Masks = Mapping[int, bytes | memoryview]  # by node, a bit for each token id that may follow
Question = tuple[int, list[int], int, list[int], list[int], list[int], int]  # as `redrafter.grammar.child` takes it
Answer = tuple[bool, str | None, Masks]  # whether the text has ended, why it was given up, and the masks


class GrammarProcess(SandboxedProcess):
    """A process that compiles one grammar and follows its texts. It ends with this object, or by `end`.

    Attributes:
        lock: Held from a question to its answer.
        order: Number by which threads that need several locks sort them.
        memory: Bytes that the compiled grammar takes.
        forgotten: Numbers of dropped texts, which the next question reports to the process.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Fork a process from the tokenizer's zygote, which is started if there is none.

        Raises:
            MissingDependencyError: llguidance is not installed, or the system is Windows.
            ArgumentError: llguidance cannot read the tokenizer.
            ReDrafterError: No process can be started.
        """
        super().__init__(lambda: zygote_for(tokenizer))
        self.forgotten: deque[int] = deque()
        self.lock, self.order, self.memory = threading.Lock(), next(_process_numbers), 0

    def compile(self, source: GrammarSource) -> None:
        """Let the process compile a grammar, and wait for it.

        Raises:
            ArgumentError: The grammar cannot be compiled.
        """
        try:
            self.connection.settimeout(COMPILE_WAIT_SECONDS)
            send_frame(self.connection, json.dumps(source).encode())
            reply = receive_frame(self.connection)
        except TimeoutError as error:
            self.end()
            raise ArgumentError(f"grammar: too complex: it was not compiled in {COMPILE_WAIT_SECONDS} s") from error
        except (EOFError, OSError) as error:
            self.end()
            raise ArgumentError(
                "grammar: too complex: its compilation ended unfinished; it may take "
                f"{COMPILE_CPU_SECONDS} s of a processor and {MAX_PROCESS_BYTES >> 20} MB of memory"
            ) from error
        if reply[:1] != b"+":
            self.end()
            raise ArgumentError(reply[1:].decode())
        self.memory = max(int(reply[1:]), 0)

    def ask(self, questions: Sequence[Question]) -> None:
        """Send questions; the caller holds the lock until it has called `answers`."""
        # Popped one by one: other threads append without the lock.
        forgotten = [self.forgotten.popleft() for _ in range(len(self.forgotten))]
        try:
            # Twice the processor time, as the process may share a core.
            self.connection.settimeout(ANSWER_SLACK_SECONDS + 2 * step_cpu_seconds(len(questions)))
            send_frame(self.connection, json.dumps((forgotten, questions)).encode())
        except OSError:
            self.end()

    def answers(self) -> list[Answer] | None:
        """Receive the answers to the questions; None if the process has ended or took too long."""
        if self.ended:
            return None
        try:
            heads, bits = json.loads(receive_frame(self.connection)), memoryview(receive_frame(self.connection))
        except (EOFError, OSError):
            self.end()
            return None
        answers: list[Answer] = []
        for ended, error, nodes, width in heads:
            masks = {node: bits[index * width : (index + 1) * width] for index, node in enumerate(nodes)}
            answers.append((ended, error, masks))
            bits = bits[len(nodes) * width :]
        return answers

    def forget(self, text: int) -> None:
        """Drop a text in the process: now, or with the next question if another thread is asking one."""
        if not self.owned:
            return  # this process is a fork; the text is its parent's
        self.forgotten.append(text)
        if self.lock.acquire(blocking=False):
            try:
                self.ask([])
            finally:
                self.lock.release()


def zygote_for(tokenizer: "PreTrainedTokenizerBase") -> Zygote:
    """Return the zygote of a tokenizer, a new one if there is none or it has died."""
    if sys.platform == "win32":
        raise MissingDependencyError("grammars need Unix sockets, which Windows lacks: use Linux or macOS")
    if find_spec("llguidance") is None:
        raise MissingDependencyError(f"grammars need llguidance: {how_to_install('guided')}")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _unreadable("only fast tokenizers are supported")

    def start() -> Zygote:
        end = json.dumps(tokenizer.eos_token_id).encode()
        return Zygote("redrafter.grammar.child", [end, backend.to_str().encode()])

    try:
        return zygote_of(tokenizer, start)
    except NotPreparedError as error:
        if not error.missing:
            raise _unreadable(str(error)) from error
        raise MissingDependencyError(
            f"grammars need llguidance, which cannot be imported: {error}; {how_to_install('guided')}"
        ) from error


def _unreadable(why: str) -> ArgumentError:
    return ArgumentError(f"grammar: this tokenizer cannot be used for grammars: {' '.join(why.split()):.300}")


class Grammar:
    """A grammar that generated texts must follow, over the tokens of one tokenizer.

    It never changes, so any number of rows may share it. All constructors raise `ArgumentError` for a grammar that
    cannot be read, matches no text, or is too large or too complex.

    Attributes:
        source: The grammar's notation and text.
        process: The process that follows its texts.
    """

    def __init__(
        self, source: str | GrammarSource, tokenizer: "PreTrainedTokenizerBase", process: GrammarProcess | None = None
    ) -> None:
        """Compile a grammar.

        Args:
            source: The grammar in llguidance's own notation, or a `GrammarSource` in any notation.
            tokenizer: The tokenizer of the texts; a fast one.
            process: A new process to compile in; None to start one.
        """
        if not isinstance(source, GrammarSource):
            source = GrammarSource("llguidance", checked_text(source))
        self.source = source
        self.process = GrammarProcess(tokenizer) if process is None else process
        self._tokenizer = tokenizer
        self.process.compile(self.source)

    @classmethod
    def json_schema(cls, schema: Mapping[str, object] | bool | str, tokenizer: "PreTrainedTokenizerBase") -> "Grammar":
        """Allow JSON that a schema describes; keywords that llguidance does not know are refused."""
        return cls(GrammarSource.json_schema(schema), tokenizer)

    @classmethod
    def json_object(cls, tokenizer: "PreTrainedTokenizerBase") -> "Grammar":
        """Allow any JSON object."""
        return cls(GrammarSource.from_spec({"json_object": True}), tokenizer)

    @classmethod
    def regex(cls, pattern: str, tokenizer: "PreTrainedTokenizerBase") -> "Grammar":
        """Allow texts that a regular expression matches as a whole; it has no look-around and no back-references."""
        return cls(GrammarSource("regex", checked_text(pattern)), tokenizer)

    @classmethod
    def lark(cls, text: str, tokenizer: "PreTrainedTokenizerBase") -> "Grammar":
        """Allow the texts of a context-free grammar in llguidance's variant of Lark, which begins at `start`."""
        return cls(GrammarSource("lark", checked_text(text)), tokenizer)

    @classmethod
    def ebnf(cls, text: str, tokenizer: "PreTrainedTokenizerBase") -> "Grammar":
        """Allow the texts of a context-free grammar in GBNF, llama.cpp's notation, which begins at `root`."""
        return cls(GrammarSource("ebnf", checked_text(text)), tokenizer)

    @classmethod
    def choice(cls, texts: Sequence[str], tokenizer: "PreTrainedTokenizerBase") -> "Grammar":
        """Allow one of several texts."""
        return cls(GrammarSource.choice(texts), tokenizer)

    @classmethod
    def of(cls, spec: Mapping[str, object] | str, tokenizer: "PreTrainedTokenizerBase") -> "Grammar":
        """Make a grammar of any kind.

        Args:
            spec: `{"json_schema": ...}`, `{"json_object": true}`, `{"regex": ...}`, `{"lark": ...}`, `{"ebnf": ...}` or
                `{"choice": [...]}`, or one of these as JSON.
            tokenizer: The tokenizer of the texts; a fast one.
        """
        return cls(GrammarSource.from_spec(spec), tokenizer)

    def restore(self) -> None:
        """Compile the grammar again if its process has ended, for texts that begin later."""
        if not self.process.alive:
            self.process = GrammarProcess(self._tokenizer)
            self.process.compile(self.source)


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
        process: The process of the grammar.
        number: The text's number in the grammar's process.
        ended: Whether the text contains an end token.
        error: Why the grammar was given up, on one line; from then on only an end is allowed. None without an error.
    """

    def __init__(self, grammar: Grammar, ends: Collection[int]) -> None:
        """Begin an empty text; its `ends` are allowed where the grammar may end, and required where it must."""
        self.ends = sorted({token for token in ends if token >= 0})
        if not self.ends:
            raise ArgumentError("a grammar needs a token that ends the text: give eos_token_id")
        self.process: GrammarProcess = grammar.process
        self.ended = False
        self.error: str | None = None
        # Unique in the program, as texts of several engines may share a process.
        self.number = next(_text_numbers) & 0x7FFFFFFF
        self._sent: list[int] = []
        self._asked = False

    def __del__(self) -> None:
        if getattr(self, "_asked", False) and not self.process.ended:
            self.process.forget(self.number)

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
    groups: dict[GrammarProcess, list[int]] = {}
    for index, (text, _) in enumerate(requests):
        groups.setdefault(text.process, []).append(index)
    order = sorted(groups, key=lambda process: process.order)  # otherwise two threads could deadlock
    masks: list[Masks] = [{}] * len(requests)
    with ExitStack() as locks:
        try:
            for process in order:
                locks.enter_context(process.lock)
                process.ask([requests[index][0].question(requests[index][1]) for index in groups[process]])
            for process in order:
                answers = process.answers()
                for position, index in enumerate(groups[process]):
                    text, tree = requests[index]
                    answer = None if answers is None else answers[position]
                    masks[index] = text.read_answer(answer, len(tree.tokens))
        except BaseException:  # such as Ctrl-C: an answer that was not read would be taken for a later one
            for process in order:
                process.end()
            raise
    return masks
