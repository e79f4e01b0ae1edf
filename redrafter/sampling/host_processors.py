"""Logits processors that run on the host: a user's own code, and grammars."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from redrafter.grammar.grammar import GuidedText, TextTree, compute_masks
from redrafter.parallel.ranks import ALONE, Ranks
from redrafter.sampling.prefixes import Prefixes
from redrafter.sampling.processors import HostProcessor


class PerNode(HostProcessor[Callable[[Tensor, Tensor], Tensor]]):
    """A function of ids `[1, L]` and scores `[1, V]` for each row, called once for every node before the row's end.

    A tree may contain sequences that the processor itself has forbidden, and a user's grammar need not be able to
    continue those: an error at a node whose path has a token of score -inf is not raised, since that node cannot be
    drawn.
    """

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        """Return `scores` `[B, N, V]` processed node by node."""
        tree, sequences, limits = prefixes.tree, prefixes.sequences(), prefixes.limit.tolist()
        whole = tree.tokens.shape[1] == tree.new
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        processed = scores.clone()
        for row, (processor, counts) in enumerate(zip(self.of_rows, prefixes.counts.tolist(), strict=False)):
            for node, count in enumerate(counts):
                if count >= limits[row]:
                    continue
                of_node = scores[row, node, None].clone()  # a user's processor may write into it
                try:
                    processed[row, node] = processor(sequences[row, node, None, :count], of_node)
                except Exception:
                    # A tree that is still growing is incomplete here, and an invalid draft is not an error.
                    if whole and not _forbidden(processed[row], tokens[row], parents[row], node):
                        raise
        return processed


def _forbidden(scores: Tensor, tokens: list[int], parents: list[int], node: int) -> bool:
    """Return whether a token on the path to `node` has score -inf (`[N, V]`) where it would be drawn."""
    while node:
        if scores[parents[node], tokens[node]] == -math.inf:
            return True
        node = parents[node]
    return False


class RowGrammars(HostProcessor[GuidedText | None]):
    """Forbids tokens that the rows' grammars forbid; each row has its state in a grammar, or None for no grammar.

    A grammar is evaluated at each node, for the sequence that leads there, before the target draws: so the drawn token
    follows the grammar, whatever was drafted, and equals the draw without drafts. If other processors forbid all tokens
    that a grammar allows, the grammar wins.

    Of several ranks each may follow the grammars, or rank 0 alone, whose draws count. All give a text up with rank 0.
    """

    def __init__(self, of_rows: Sequence[GuidedText | None], ranks: Ranks = ALONE) -> None:
        """Make a processor of these rows, which the ranks compute together."""
        super().__init__(of_rows)
        self.ranks = ranks

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        """Return `scores` `[B, N, V]` with -inf at tokens that the grammars forbid."""
        guided = [(row, state) for row, state in enumerate(self.of_rows[: len(scores)]) if state is not None]
        if not guided:
            return scores
        packed = None if guided[0][1].process is None else self._packed(guided, scores, prefixes)
        errors = self.ranks.from_first([state.error for _, state in guided])
        for (_, state), error in zip(guided, errors, strict=True):
            state.error = error
        if packed is None:
            return scores
        if scores.is_cuda:
            # Only a copy from pinned memory runs while the host launches the next kernels.
            packed = packed.pin_memory()
        return _masked(scores, packed.to(scores.device, non_blocking=True))

    def _packed(self, guided: Sequence[tuple[int, GuidedText]], scores: Tensor, prefixes: Prefixes) -> Tensor:
        """Return `[B, N, V / 32]` int32 on the host, with a bit set for each allowed id."""
        rows, nodes, vocabulary = scores.shape
        width = 4 * -(-vocabulary // 32)
        # All allowed at first: rows without a grammar, and nodes past a limit, are not restricted.
        packed = bytearray(b"\xff") * (rows * nodes * width)
        tree = prefixes.tree
        columns = [prefixes.length[:, None], prefixes.prompt[:, None], prefixes.limit[:, None]]
        # One copy to the host for all numbers, since each copy waits for the device.
        known = torch.cat([*columns, tree.tokens, tree.parents], dim=1).tolist()
        first = min(known[row][1] for row, _ in guided)
        # Only the generated parts are copied: grammars do not read the prompts.
        texts = prefixes.tokens[:, first : max(known[row][0] for row, _ in guided) + 1].cpu()
        whole = tree.tokens.shape[1]
        skipped = whole - nodes  # nodes above the level that a draft model is computing
        asked = []
        for row, state in guided:
            length, prompt, limit, *rest = known[row]
            if length + 1 >= limit:
                continue  # tokens past the limit need not follow the grammar
            text = texts[row, prompt - first : length + 1 - first].tolist()
            asked.append((row, state, TextTree(text, rest[:whole], rest[whole:], limit - length - 1)))
        # One call for all rows, as the grammars' process computes them in parallel and answers once.
        tree_masks = compute_masks([(state, tree) for _, state, tree in asked])
        for (row, *_), masks in zip(asked, tree_masks, strict=True):
            for node, mask in masks.items():
                if node >= skipped:
                    begin = (row * nodes + node - skipped) * width
                    # A tokenizer may have fewer ids than the model: those missing stay forbidden.
                    packed[begin : begin + width] = bytes(mask[:width]).ljust(width, b"\0")
        return torch.frombuffer(packed, dtype=torch.int32).view(rows, nodes, width // 4)


def _masked(scores: Tensor, packed: Tensor) -> Tensor:
    """Return scores with -inf at ids whose bit is not set; if all would be -inf, ids whose bit is set get 0."""
    bit = torch.arange(32, dtype=torch.int32, device=packed.device)
    allowed = ((packed[..., None] >> bit) & 1).bool().flatten(-2)[..., : scores.shape[-1]]  # [B, N, V]
    masked = scores.masked_fill(~allowed, -math.inf)
    empty = (masked == -math.inf).all(-1, keepdim=True) & ~allowed.all(-1, keepdim=True)
    return masked.masked_fill(empty & allowed, 0.0)
