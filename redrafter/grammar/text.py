"""One text that follows a grammar, as the program sees it: what it may hold is known in the grammar's process."""

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

Masks = Mapping[int, bytes | memoryview]


class TextTree(NamedTuple):
    """Where a text stands, and the drafts behind it.

    Args:
        text: all that was written so far.
        tokens: of a tree whose root is the text's last token, root first.
        parents: the node above each node.
        levels: how many levels of the tree to look at.
    """

    text: list[int]
    tokens: list[int]
    parents: list[int]
    levels: int


class GuidedText:
    """One text of a grammar.

    Args:
        grammar: what the text follows.
        ends: ids that end the text, allowed where the grammar may end, and nothing else where it must.

    Attributes:
        ended: whether an end was written.
        error: why the grammar could not be followed to its end, in one line; from there on only an end is allowed.
    """

    def __init__(self, grammar: Grammar, ends: Collection[int]) -> None:
        self.ends = sorted({token for token in ends if token >= 0})
        if not self.ends:
            raise ArgumentError("a grammar needs a token that ends the text: give eos_token_id")
        self.process: GrammarProcess = grammar.process
        self.ended = False
        self.error: str | None = None
        self._number = next(_numbers) & 0x7FFFFFFF
        self._told: list[int] = []
        self._asked = False

    def __del__(self) -> None:
        if getattr(self, "_asked", False) and not self.process.ended:
            self.process.forget(self._number)

    def question(self, tree: TextTree) -> Question:
        """Ask for what the process does not know yet; it has then been told of the text."""
        if tree.text[: len(self._told)] != self._told:
            self._told = []
        known, self._asked = len(self._told), True
        new = tree.text[known:]
        self._told += new
        return Question(self._number, self.ends, known, new, tree.tokens, tree.parents, tree.levels)

    def take(self, answer: Answer | None, nodes: int) -> Masks:
        """Return the masks of an answer. Without one, which is an error, only an end is allowed anywhere."""
        if answer is not None:
            self.ended, self.error = answer.ended, answer.error
            return answer.masks
        if self.error is None:
            self.error = (
                f"grammar: given up after {len(self._told)} tokens: its process ended, as it does where a step takes "
                "too long or too much memory"
            )
        mask = bytearray(self.ends[-1] // 8 + 1)
        for token in self.ends:
            mask[token >> 3] |= 1 << (token & 7)
        return dict.fromkeys(range(nodes), bytes(mask))


def compute_masks(asked: Sequence[tuple[GuidedText, TextTree]]) -> list[Masks]:
    """Return for each text by node what may follow it, a bit for each id, where its grammar lets a text come to.

    All processes are asked before any answer is waited for, so they work at the same time.
    """
    groups: dict[GrammarProcess, list[int]] = {}
    for place, (text, _) in enumerate(asked):
        groups.setdefault(text.process, []).append(place)
    order = sorted(groups, key=lambda process: process.order)  # else two threads might wait for each other
    found: list[Masks] = [{}] * len(asked)
    with ExitStack() as locks:
        try:
            for process in order:
                locks.enter_context(process.lock)
                process.ask([asked[place][0].question(asked[place][1]) for place in groups[process]])
            for process in order:
                _collect(process, [(place, *asked[place]) for place in groups[process]], found)
        except BaseException:  # a question without its answer, as where somebody presses Ctrl-C
            for process in order:
                process.end()
            raise
    return found


def _collect(process: GrammarProcess, asked: Sequence[tuple[int, GuidedText, TextTree]], found: list[Masks]) -> None:
    answers = None if process.ended else process.answers(len(asked))
    for index, (place, text, tree) in enumerate(asked):
        found[place] = text.take(None if answers is None else answers[index], len(tree.tokens))
