"""One text that follows a grammar, as the program sees it; the grammar's process knows which tokens may follow."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from typing import NamedTuple

from redrafter.errors import ArgumentError
from redrafter.grammar.grammar import Grammar
from redrafter.grammar.process import GrammarProcess
from redrafter.grammar.wire import Answer, Question

__all__ = ["GuidedText", "TextTree", "compute_masks"]

_numbers = count()

Masks = Mapping[int, bytes | memoryview]  # by node, a bit for each token id that may follow


class TextTree(NamedTuple):
    """A text and the tree of drafts that may follow it.

    Attributes:
        text: All tokens generated so far.
        tokens: Tokens of the tree, root first; the root is the last token of the text.
        parents: Index of each node's parent.
        levels: How many levels of the tree need masks.
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
        number: Number that stands for the text in the grammar's process.
        ended: Whether the text has an end token.
        error: Why the grammar could not be followed further, on one line; from there on only an end is allowed. None
            while all is well.
    """

    def __init__(self, grammar: Grammar, ends: Collection[int]) -> None:
        """Begin an empty text.

        Args:
            grammar: The grammar to follow.
            ends: Ids that end the text; allowed where the grammar may end, and nothing else where it must.
        """
        self.ends = sorted({token for token in ends if token >= 0})
        if not self.ends:
            raise ArgumentError("a grammar needs a token that ends the text: give eos_token_id")
        self.process: GrammarProcess = grammar.process
        self.ended = False
        self.error: str | None = None
        self.number = next(_numbers) & 0x7FFFFFFF
        self._sent: list[int] = []
        self._asked = False

    def __del__(self) -> None:
        if getattr(self, "_asked", False) and not self.process.ended:
            self.process.forget(self.number)

    def question(self, tree: TextTree) -> Question:
        """Return the question for the masks of a tree, with the part of the text that the process does not know yet.

        The question must be sent: the process is then taken to know the whole text.
        """
        if tree.text[: len(self._sent)] != self._sent:
            self._sent = []
        known, self._asked = len(self._sent), True
        new = tree.text[known:]
        self._sent += new
        return Question(self.number, self.ends, known, new, tree.tokens, tree.parents, tree.levels)

    def read_answer(self, answer: Answer | None, nodes: int) -> Masks:
        """Take over what an answer says of the text, and return its masks.

        Args:
            answer: The answer; None if the process has ended, which is an error of the text: only an end is allowed at
                all nodes then.
            nodes: Nodes of the tree.
        """
        if answer is not None:
            self.ended, self.error = answer.ended, answer.error
            return answer.masks
        if self.error is None:
            self.error = (
                f"grammar: given up after {len(self._sent)} tokens: its process ended, as it does where a step takes "
                "too long or too much memory"
            )
        mask = bytearray(self.ends[-1] // 8 + 1)
        for token in self.ends:
            mask[token >> 3] |= 1 << (token & 7)
        return dict.fromkeys(range(nodes), bytes(mask))


def compute_masks(requests: Sequence[tuple[GuidedText, TextTree]]) -> list[Masks]:
    """Return the masks of allowed next tokens for several texts, at the nodes that their grammars allow.

    All processes are asked before any answer is waited for, so they work at the same time.

    Args:
        requests: The texts, each with the tree of drafts that may follow it.
    """
    groups: dict[GrammarProcess, list[int]] = {}
    for index, (text, _) in enumerate(requests):
        groups.setdefault(text.process, []).append(index)
    order = sorted(groups, key=lambda process: process.order)  # or else two threads might wait for each other
    masks: list[Masks] = [{}] * len(requests)
    with ExitStack() as locks:
        try:
            for process in order:
                locks.enter_context(process.lock)
                process.ask([requests[index][0].question(requests[index][1]) for index in groups[process]])
            for process in order:
                _collect(process, [(index, *requests[index]) for index in groups[process]], masks)
        except BaseException:  # as by Ctrl-C: the answer to a question was not read
            for process in order:
                process.end()
            raise
    return masks


def _collect(process: GrammarProcess, requests: Sequence[tuple[int, GuidedText, TextTree]], masks: list[Masks]) -> None:
    """Receive a process's answers, and put the masks of each text at its index."""
    answers = None if process.ended else process.answers(len(requests))
    for position, (index, text, tree) in enumerate(requests):
        masks[index] = text.read_answer(None if answers is None else answers[position], len(tree.tokens))
