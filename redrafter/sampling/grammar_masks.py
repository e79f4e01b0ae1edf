"""Grammars as logits processors: masks over the vocabulary at every node of a token tree.

A grammar is asked at each node, for the text that leads there, before the target draws: so what is drawn follows the
grammar, whatever was drafted, and is what is drawn without drafts.
"""

import math
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor

from redrafter.errors import ArgumentError
from redrafter.grammar.grammar import Grammar, GuidedText, TextTree, compute_masks
from redrafter.sampling.prefixes import Prefixes
from redrafter.sampling.processors import HostProcessor
from redrafter.tree.token_tree import chain


class RowGrammars(HostProcessor[GuidedText | None]):
    """Forbids what the rows' grammars forbid; each row has its text's state in its grammar, or None for no grammar.

    Where something else forbids all that a grammar allows, the grammar wins.
    """

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        """Return `scores` `[B, N, V]` with -inf at what the grammars forbid."""
        guided = [(row, state) for row, state in enumerate(self.of_rows[: len(scores)]) if state is not None]
        if not guided:
            return scores
        packed = self._packed(guided, scores, prefixes)
        if scores.is_cuda:
            packed = packed.pin_memory()
        return _masked(scores, packed.to(scores.device, non_blocking=True))

    def _packed(self, guided: Sequence[tuple[int, GuidedText]], scores: Tensor, prefixes: Prefixes) -> Tensor:
        """Return `[B, N, V / 32]` int32 on the host, with a bit set for each id that is allowed."""
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
        asked = []
        for row, state in guided:
            length, prompt, limit, *rest = known[row]
            if length + 1 >= limit:
                continue  # what stands past the limit follows no grammar
            text = texts[row, prompt - first : length + 1 - first].tolist()
            asked.append((row, state, TextTree(text, rest[:whole], rest[whole:], limit - length - 1)))
        tree_masks = compute_masks([(state, tree) for _, state, tree in asked])
        for (row, *_), masks in zip(asked, tree_masks, strict=True):
            for node, mask in masks.items():
                if node >= skipped:
                    begin = (row * nodes + node - skipped) * width
                    packed[begin : begin + width] = bytes(mask[:width]).ljust(width, b"\0")
        return torch.frombuffer(packed, dtype=torch.int32).view(rows, nodes, width // 4)


def _masked(scores: Tensor, packed: Tensor) -> Tensor:
    """Return scores with -inf at ids whose bit is not set; where all would be -inf, ids whose bit is set get 0."""
    bit = torch.arange(32, dtype=torch.int32, device=packed.device)
    allowed = ((packed[..., None] >> bit) & 1).bool().flatten(-2)[..., : scores.shape[-1]]  # [B, N, V]
    masked = scores.masked_fill(~allowed, -math.inf)
    empty = (masked == -math.inf).all(-1, keepdim=True) & ~allowed.all(-1, keepdim=True)
    return masked.masked_fill(empty & allowed, 0.0)


class GrammarProcessor(LogitsProcessor):
    """Grammars as a processor for `model.generate`.

    Attributes:
        grammars: One for all rows, or one per row, None for rows without one.
        prompt_length: Length of the padded prompt.
        ends: Ids that end a text.
    """

    def __init__(
        self, grammars: Grammar | Sequence[Grammar | None] | None, prompt_length: int, ends: Collection[int] = ()
    ) -> None:
        self.grammars, self.prompt_length, self.ends = grammars, prompt_length, ends
        self._rows: RowGrammars | None = None

    def of_request(self, rows: int, ends: Collection[int]) -> "GrammarProcessor":
        """Return the processor for `rows` output rows with these end tokens."""
        given = self._of(rows)
        if len(given) != rows:
            raise ArgumentError(f"grammar has {len(given)} entries for {rows} output rows; give one, or one per row")
        return GrammarProcessor(given, self.prompt_length, ends)

    def begin(self, rows: int) -> RowGrammars:
        """Begin the texts of `rows` rows, of which nothing is written yet."""
        given = self._of(rows)
        for grammar in given:
            if grammar is not None:
                grammar.restore()
        return RowGrammars([None if grammar is None else GuidedText(grammar, self.ends) for grammar in given])

    def _of(self, rows: int) -> Sequence[Grammar | None]:
        return self.grammars if isinstance(self.grammars, Sequence) else [self.grammars] * rows

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return `scores` `[B, V]` with -inf at what the grammars forbid after the texts `input_ids` `[B, L]`."""
        rows, length = input_ids.shape
        committed = torch.full((rows,), length - 1, device=input_ids.device)
        prompt = torch.full_like(committed, self.prompt_length)
        root = chain(input_ids[:, -1:])
        prefixes = Prefixes(input_ids, committed, prompt, torch.full_like(committed, length + 1), root, length)
        self._rows = self._rows or self.begin(rows)
        return self._rows(scores[:, None], prefixes)[:, 0]


def check_grammars(processors: Iterable[object]) -> None:
    """Raise `ArgumentError` if a row's grammar could not be followed to its end."""
    for processor in processors:
        for row, state in enumerate(processor.of_rows if isinstance(processor, RowGrammars) else ()):
            if state is not None and state.error is not None:
                raise ArgumentError(f"row {row}: {state.error}")
