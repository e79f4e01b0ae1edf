"""Masks of grammars over the vocabulary, at every node of a token tree.

A grammar is asked at each node, for the text that leads there, before the target draws: so what is drawn follows the
grammar, whatever was drafted, and is what is drawn without drafts.
"""

import math
import time
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor

from redrafter.errors import ArgumentError
from redrafter.grammar import Grammar, short
from redrafter.prefixes import Prefixes
from redrafter.tree import chain

__all__ = ["GrammarProcessor", "GrammarState", "RowGrammars", "check_grammars"]

# Seconds of a processor that the masks of one text may take, and as many more for each of its tokens: rows beside it
# wait for them.
PATIENCE, EACH = 0.5, 0.05


class GrammarState:
    """Where one text stands in its grammar.

    ends: ids that end the text, allowed where the grammar may end, and nothing else where it must. error: why the
    grammar could not be followed to its end, in one line; from there on nothing but an end is allowed.
    """

    def __init__(self, grammar: Grammar, ends: Collection[int]) -> None:
        ends = frozenset(token for token in ends if token >= 0)
        if not ends:
            raise ArgumentError("a grammar needs a token that ends the text: give eos_token_id")
        self.grammar, self.ends = grammar, ends
        self._stops = self.ends | set(grammar.vocabulary.eos_tokens)  # no text of the grammar holds one
        self._nothing = bytes(4 * -(-max(grammar.vocabulary.vocab_size, max(ends) + 1) // 32))
        self._only_ends = self._with_ends(bytearray(self._nothing))
        self._text: list[int]  # what was written
        self._behind: list[int]  # what the matcher stands behind: the text up to its end, and drafts
        self.ended: bool
        self.error: str | None
        self._spent = 0.0  # seconds
        self._restart()

    def advance(self, text: Sequence[int]) -> None:
        """Stand at the end of `text`, all that was written so far; what it begins with is known most often."""
        text = list(text)
        if text[: len(self._text)] != self._text:
            self._restart()
        new, self._text = text[len(self._text) :], text
        if self.ended or self.error is not None:
            return
        stop = next((index for index, token in enumerate(new) if token in self._stops), len(new))
        self.ended = stop < len(new)
        self._take(new[:stop])

    def masks(self, tokens: Sequence[int], parents: Sequence[int], levels: int) -> dict[int, bytes]:
        """By node what may follow it, a bit for each id, where the grammar lets a text come to.

        tokens, parents: of a tree, parents first, whose root is where the text stands. levels: of it, to look at.
        """
        begun = time.thread_time() - self._spent
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
            self._spent = time.thread_time() - begun
            if self._spent > PATIENCE + EACH * len(self._text) and self.error is None:
                self._give_up(f"its masks took {self._spent:.1f} s")
            if depth + 1 < levels:
                todo += [(child, depth + 1) for child in children[node]]
        if self.error is None:
            self._go_back(here)
        return found

    def _restart(self) -> None:
        self._matcher, self._age = self.grammar.start(), self.grammar.age
        self._text, self._behind, self.ended, self.error = [], [], False, None

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
        why = short(self._matcher.get_error()) or otherwise
        self.error = f"grammar: given up after {len(self._behind)} tokens: {why}"

    def _go_back(self, length: int) -> None:
        if len(self._behind) > length:
            self._matcher.rollback(len(self._behind) - length)
            del self._behind[length:]

    def _mask(self) -> bytes:
        """Of what may follow where the matcher stands."""
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


class RowGrammars:
    """A `Processor`: forbids what rows' grammars forbid. states: by place, None for a row that is free, as are places
    past the last; they may be changed between steps, each belongs to one text.

    Where something else forbids all that a grammar allows, the grammar wins.
    """

    on_host = True

    def __init__(self, states: list[GrammarState | None]) -> None:
        self.states = states

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        guided = [(row, state) for row, state in enumerate(self.states[: len(scores)]) if state is not None]
        if not guided:
            return scores
        packed = self._packed(guided, scores, prefixes)
        if scores.is_cuda:
            packed = packed.pin_memory()
        return _masked(scores, packed.to(scores.device, non_blocking=True))

    def _packed(self, guided: Sequence[tuple[int, GrammarState]], scores: Tensor, prefixes: Prefixes) -> Tensor:
        """`[B, N, V / 32]` int32, a bit for each id, on the host; all bits are set where nothing is forbidden."""
        rows, nodes, vocabulary = scores.shape
        width = 4 * -(-vocabulary // 32)
        packed = bytearray(b"\xff") * (rows * nodes * width)
        tree = prefixes.tree
        columns = [prefixes.length[:, None], prefixes.prompt[:, None], prefixes.limit[:, None]]
        known = torch.cat([*columns, tree.tokens, tree.parents], dim=1).tolist()
        first = min(known[row][1] for row, _ in guided)
        texts = prefixes.tokens[:, first : max(known[row][0] for row, _ in guided) + 1].cpu()
        whole = tree.tokens.shape[1]
        skipped = whole - nodes  # the upper part of a tree that a draft model is growing
        for row, state in guided:
            length, prompt, limit, *rest = known[row]
            if length + 1 >= limit:
                continue  # what stands past the limit follows no grammar
            state.advance(texts[row, prompt - first : length + 1 - first].tolist())
            for node, mask in state.masks(rest[:whole], rest[whole:], limit - length - 1).items():
                if node >= skipped:
                    begin = (row * nodes + node - skipped) * width
                    packed[begin : begin + width] = mask[:width].ljust(width, b"\0")
        return torch.frombuffer(packed, dtype=torch.int32).view(rows, nodes, width // 4)


def _masked(scores: Tensor, packed: Tensor) -> Tensor:
    """-inf at ids whose bit is not set; where that leaves none that was not -inf before, those that are set are 0."""
    bit = torch.arange(32, dtype=torch.int32, device=packed.device)
    allowed = ((packed[..., None] >> bit) & 1).bool().flatten(-2)[..., : scores.shape[-1]]  # [B, N, V]
    masked = scores.masked_fill(~allowed, -math.inf)
    empty = (masked == -math.inf).all(-1, keepdim=True) & ~allowed.all(-1, keepdim=True)
    return masked.masked_fill(empty & allowed, 0.0)


class GrammarProcessor(LogitsProcessor):
    """The same for `model.generate`, one text in a row. grammars: one for all rows, or one per row, None for free ones.
    prompt_length: of the padded prompt. ends: ids that end a text."""

    def __init__(
        self, grammars: Grammar | Sequence[Grammar | None] | None, prompt_length: int, ends: Collection[int] = ()
    ) -> None:
        self.grammars, self.prompt_length, self.ends = grammars, prompt_length, ends
        self._rows: RowGrammars | None = None

    def of_request(self, rows: int, ends: Collection[int]) -> "GrammarProcessor":
        """The same for so many output rows with these end tokens."""
        given = self._of(rows)
        if len(given) != rows:
            raise ArgumentError(f"grammar has {len(given)} entries for {rows} output rows; give one, or one per row")
        return GrammarProcessor(given, self.prompt_length, ends)

    def begin(self, rows: int) -> RowGrammars:
        """For texts of so many rows, of which nothing is written yet."""
        return RowGrammars([None if each is None else GrammarState(each, self.ends) for each in self._of(rows)])

    def _of(self, rows: int) -> Sequence[Grammar | None]:
        return self.grammars if isinstance(self.grammars, Sequence) else [self.grammars] * rows

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows, length = input_ids.shape
        place = torch.full((rows,), length - 1, device=input_ids.device)
        prompt = torch.full_like(place, self.prompt_length)
        root = chain(input_ids[:, -1:])
        prefixes = Prefixes(input_ids, place, prompt, torch.full_like(place, length + 1), root, length)
        self._rows = self._rows or self.begin(rows)
        return self._rows(scores[:, None], prefixes)[:, 0]


def check_grammars(processors: Iterable[object]) -> None:
    """Raise `ArgumentError` if a row's grammar could not be followed to its end."""
    for processor in processors:
        for row, state in enumerate(processor.states if isinstance(processor, RowGrammars) else ()):
            if state is not None and state.error is not None:
                raise ArgumentError(f"row {row}: {state.error}")
