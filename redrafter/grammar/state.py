"""Where texts stand in their grammars.

This runs in the process of a grammar (`grammar_child`), where it may fail or be killed; it knows no torch.
"""

import time
from collections.abc import Collection, Sequence

from redrafter.grammar import limits
from redrafter.grammar.compiled import CompiledGrammar, one_line

__all__ = ["GrammarState"]


class GrammarState:
    """Where one text stands in its grammar.

    Args:
        grammar: what the text follows.
        ends: ids that end the text, allowed where the grammar may end, and nothing else where it must.

    Attributes:
        ended: whether an end was written.
        error: why the grammar could not be followed to its end, in one line; from there on only an end is allowed.
    """

    def __init__(self, grammar: CompiledGrammar, ends: Collection[int]) -> None:
        self.grammar, self.ends = grammar, frozenset(ends)
        self._stops = self.ends | set(grammar.vocabulary.eos_tokens)  # no text of the grammar holds one
        self._nothing = bytes(4 * -(-max(grammar.vocabulary.vocab_size, max(ends) + 1) // 32))
        self._only_ends = self._with_ends(bytearray(self._nothing))
        self.text: list[int]  # what was written
        self._behind: list[int]  # what the matcher stands behind: the text up to its end, and drafts
        self.ended: bool
        self.error: str | None
        self._spent = 0.0  # seconds
        self._restart()

    def advance(self, text: Sequence[int]) -> None:
        """Stand at the end of `text`, all that was written so far; what it begins with is known most often."""
        begun = time.process_time() - self._spent
        text = list(text)
        if text[: len(self.text)] != self.text:
            self._restart()
        new, self.text = text[len(self.text) :], text
        if self.ended or self.error is not None:
            return
        stop = next((index for index, token in enumerate(new) if token in self._stops), len(new))
        self.ended = stop < len(new)
        self._take(new[:stop])
        self._spent = time.process_time() - begun

    def masks(self, tokens: Sequence[int], parents: Sequence[int], levels: int) -> dict[int, bytes]:
        """Return by node what may follow it, a bit for each id, where the grammar lets a text come to.

        Args:
            tokens: of a tree whose root is where the text stands.
            parents: the node above each node; they come first.
            levels: how many levels of the tree to look at.
        """
        begun = time.process_time() - self._spent
        children: list[list[int]] = [[] for _ in tokens]
        for node in range(len(tokens) - 1, 0, -1):
            children[parents[node]].append(node)
        found: dict[int, bytes] = {}
        here = len(self._behind)
        todo = [] if self.ended else [(0, 0)]  # nodes and their depth
        while todo:
            node, depth = todo.pop()
            token = tokens[node]
            if depth and self.error is None:
                if token in self._stops or not _holds(found[parents[node]], token):
                    continue
                self._go_back(here + depth - 1)
                self._take([token])
            found[node] = self._mask()
            self._spent = time.process_time() - begun
            if (
                self._spent > limits.MASK_CPU_SECONDS + limits.MASK_CPU_SECONDS_PER_TOKEN * len(self.text)
                and self.error is None
            ):
                self._give_up(f"its masks took {self._spent:.1f} s")
            if depth + 1 < levels:
                todo += [(child, depth + 1) for child in children[node]]
        if self.error is None:
            self._go_back(here)
        return found

    def _restart(self) -> None:
        self._matcher, self._age = self.grammar.start(), self.grammar.age
        self.text, self._behind, self.ended, self.error = [], [], False, None

    def _take(self, tokens: list[int]) -> None:
        """Stand behind these tokens, which were allowed."""
        self._behind += tokens
        if self._matcher.try_consume_tokens(tokens) < len(tokens):
            self._renew()

    def _renew(self, anew: bool = False) -> None:
        """Some limits count all that a matcher ever did, other drafts included: take one that knows this text alone.
        anew: some count what the grammar's other texts did too: of that as well."""
        if anew:
            self.grammar.renew(self._age)
        self._matcher, self._age = self.grammar.start(), self.grammar.age
        if self._matcher.try_consume_tokens(self._behind) < len(self._behind):
            self._matcher.compute_bitmask()  # which finds out why
            if self._matcher.is_error() and not anew:
                return self._renew(anew=True)
            self._give_up("it does not allow what was written")

    def _give_up(self, otherwise: str) -> None:
        why = one_line(self._matcher.get_error()) or otherwise
        self.error = f"grammar: given up after {len(self._behind)} tokens: {why}"

    def _go_back(self, length: int) -> None:
        if len(self._behind) > length:
            self._matcher.rollback(len(self._behind) - length)
            del self._behind[length:]

    def _mask(self) -> bytes:
        """Return what may follow where the matcher stands."""
        mask = self._ask()
        if mask is None:
            self._renew()
            mask = self._ask()
        if mask is None and self._matcher.is_error():
            self._renew(anew=True)
            mask = self._ask()
        if mask is None:
            self._give_up("no token of the vocabulary may follow")
        return mask or self._only_ends

    def _ask(self) -> bytes | None:
        """None where the grammar gives up, or leaves no way to go on with a text that is not complete."""
        if self.error is not None:
            return self._only_ends
        size = len(self._nothing)
        mask = bytearray(self._matcher.compute_bitmask()[:size].ljust(size, b"\0"))
        if self._matcher.is_error():
            return None
        for token in self._stops:
            mask[token >> 3] &= ~(1 << (token & 7))
        if self._matcher.is_accepting():
            return self._with_ends(mask)
        return None if mask == self._nothing else bytes(mask)

    def _with_ends(self, mask: bytearray) -> bytes:
        for token in self.ends:
            mask[token >> 3] |= 1 << (token & 7)
        return bytes(mask)


def _holds(mask: bytes, token: int) -> bool:
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)
