"""The state of one text in its grammar: what was generated so far, and which tokens may follow.

This runs in the process of a grammar (`redrafter.grammar.child`), where it may fail or be killed. It does not import
torch.
"""

import time
from collections.abc import Collection, Sequence

from redrafter.grammar import limits
from redrafter.grammar.compiled import CompiledGrammar, one_line

__all__ = ["GrammarState"]


class GrammarState:
    """The state of one text that follows a grammar.

    Attributes:
        grammar: The grammar.
        ends: Ids that end the text.
        text: The tokens of the text.
        matcher: llguidance's matcher, which has consumed the text up to its end, and drafts while masks are computed.
        ended: Whether the text has an end token.
        error: Why the grammar could not be followed further, on one line; from there on only an end is allowed. None
            while all is well.
    """

    def __init__(self, grammar: CompiledGrammar, ends: Collection[int]) -> None:
        """Begin an empty text.

        Args:
            grammar: The grammar to follow.
            ends: Ids that end the text; allowed where the grammar may end, and nothing else where it must.
        """
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
        """Move to the end of `text`, all tokens generated so far; most often it continues the text known before."""
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
        for node in range(len(tokens) - 1, 0, -1):
            children[parents[node]].append(node)
        masks: dict[int, bytes] = {}
        text_length = len(self._consumed)
        todo = [] if self.ended else [(0, 0)]  # nodes and their depth
        while todo:
            node, depth = todo.pop()
            token = tokens[node]
            if depth and self.error is None:
                if token in self._stops or not _allows(masks[parents[node]], token):
                    continue
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
        """Begin the text again, with a new matcher."""
        self.matcher, self._age = self.grammar.start(), self.grammar.age
        self.text, self._consumed, self.ended, self.error = [], [], False, None

    def _consume(self, tokens: list[int]) -> None:
        """Let the matcher consume tokens that were allowed."""
        self._consumed += tokens
        if self.matcher.try_consume_tokens(tokens) < len(tokens):
            self._renew()

    def _renew(self, recompile: bool = False) -> None:
        """Take a new matcher, which has consumed this text and nothing else.

        Some of llguidance's limits count all that a matcher ever did, rejected drafts included.

        Args:
            recompile: Compile the grammar again first, since other limits count what all its texts did.
        """
        if recompile:
            self.grammar.renew(self._age)
        self.matcher, self._age = self.grammar.start(), self.grammar.age
        if self.matcher.try_consume_tokens(self._consumed) < len(self._consumed):
            self.matcher.compute_bitmask()  # which sets the error
            if self.matcher.is_error() and not recompile:
                return self._renew(recompile=True)
            self._give_up("it does not allow what was written")

    def _give_up(self, otherwise: str) -> None:
        """Set the error: the matcher's own or, if it has none, `otherwise`."""
        why = one_line(self.matcher.get_error()) or otherwise
        self.error = f"grammar: given up after {len(self._consumed)} tokens: {why}"

    def _roll_back(self, length: int) -> None:
        """Let the matcher forget all but its first `length` tokens."""
        if len(self._consumed) > length:
            self.matcher.rollback(len(self._consumed) - length)
            del self._consumed[length:]

    def _mask(self) -> bytes:
        """Return the mask after the tokens that the matcher has consumed, with a new matcher if the old one fails."""
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
        """Return the matcher's mask; None if it fails, or allows no token after a text that is not complete."""
        if self.error is not None:
            return self._ends_mask
        size = len(self._empty_mask)
        mask = bytearray(self.matcher.compute_bitmask()[:size].ljust(size, b"\0"))
        if self.matcher.is_error():
            return None
        for token in self._stops:
            mask[token >> 3] &= ~(1 << (token & 7))
        if self.matcher.is_accepting():
            return self._with_ends(mask)
        return None if mask == self._empty_mask else bytes(mask)

    def _with_ends(self, mask: bytearray) -> bytes:
        """Return the mask with the end tokens allowed as well."""
        for token in self.ends:
            mask[token >> 3] |= 1 << (token & 7)
        return bytes(mask)


def _allows(mask: bytes, token: int) -> bool:
    """Return whether a mask has the bit of a token."""
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)
