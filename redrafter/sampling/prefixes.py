"""The tokens before every node of a tree, which logits processors read.

Shapes depend on `N` and on `window`, which are known on the host, never on data.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from redrafter.tree.token_tree import Tree


@dataclass(frozen=True)
class Prefixes:
    """The tokens before each node's draw.

    Node i has position `length + depth[i]` in its row, and the token drawn at it has the next one.
    """

    tokens: Tensor  # by position, without padding, `[B, T]` int64; the pending token at `length`, then undefined
    length: Tensor  # committed tokens of each row, `[B]` int64
    prompt: Tensor  # length of each row's own prompt, `[B]` int64
    limit: Tensor  # length at which each row ends, `[B]` int64: Hugging Face's `max_length` without the row's padding
    tree: Tree  # the candidates; the last M nodes are processed, all N of a whole tree
    window: int  # a number on the host, `length + 1 <= window <= T`

    def of_rows(self, rows: Tensor) -> "Prefixes":
        """Return the prefixes of rows `rows` `[S]` int64 only, with trees that no forward can use."""
        own = {name: getattr(self, name)[rows] for name in ("tokens", "length", "prompt", "limit")}
        nodes: dict[str, Any] = {x: getattr(self.tree, x)[rows] for x in ("tokens", "parents", "depth", "ancestors")}
        nodes |= dict.fromkeys(("sampled_from", "slots", "draft_length", "counts", "total"))
        return replace(self, tree=replace(self.tree, **nodes), **own)

    @property
    def counts(self) -> Tensor:
        """Number of tokens before each node's draw, the node included (`input_ids.shape[1]`), `[B, M]` int64."""
        return self.length[:, None] + self.tree.depth[:, -self.tree.new :] + 1

    @cached_property
    def paths(self) -> Tensor:
        """Tokens by depth on the path to each node, `[B, M, N + 1]`; undefined below the node."""
        rows, new, nodes = self.tree.ancestors.shape
        depth = torch.where(self.tree.ancestors, self.tree.depth[:, None], nodes)  # other nodes go to the last column
        tokens = self.tree.tokens[:, None].expand(rows, new, nodes)
        return tokens.new_zeros(rows, new, nodes + 1).scatter(2, depth, tokens)

    def at(self, positions: Tensor) -> Tensor:
        """Return each node's tokens at `positions` `[B, M, L]`, -1 where its sequence has none."""
        _, new, nodes = self.tree.ancestors.shape
        length = self.length[:, None, None]
        committed = self.tokens[:, None].expand(-1, new, -1).gather(2, positions.clamp(0, self.window - 1))
        drafted = self.paths.gather(2, (positions - length).clamp(0, nodes))
        inside = (positions >= 0) & (positions < self.counts[..., None])  # [B, M, L]
        return torch.where(positions < length, committed, drafted).masked_fill(~inside, -1)

    def last(self, count: int) -> Tensor:
        """Return the last tokens before each draw, `[B, M, count]`, padded with -1 on the left."""
        return self.at(self.counts[..., None] + torch.arange(-count, 0, device=self.tokens.device))

    def occurrences(self, vocabulary: int, first: Tensor) -> Tensor:
        """Count how often each id occurs before each node's draw, from position `first` `[B]` of its row on.

        Returns `[B, M, V]` float32. Ids past the `vocabulary`, which an embedding may have, are ignored.
        """
        committed, drafted = self._counted(first)
        index = self.tokens[:, : self.window].clamp(0, vocabulary)
        whole = committed.new_zeros(len(index), vocabulary + 1, dtype=torch.float32)  # a spare column for other ids
        # Committed tokens are counted once per row and then repeated, as all nodes share them.
        whole = whole.scatter_add(1, index, committed.float())[:, None].repeat(1, drafted.shape[1], 1)
        index = self.tree.tokens.clamp(max=vocabulary)[:, None].expand(drafted.shape)
        return whole.scatter_add(2, index, drafted.float())[..., :vocabulary]

    def seen(self, vocabulary: int, first: Tensor) -> Tensor:
        """Return which ids occur before each node's draw, `[B, M, V]` bool."""
        committed, drafted = self._counted(first)
        texts = marks(self.tokens[:, : self.window], committed, vocabulary)  # [B, V]
        return texts[:, None] | marks(self.tree.tokens[:, None].expand_as(drafted), drafted, vocabulary)

    def _counted(self, first: Tensor) -> tuple[Tensor, Tensor]:
        """Return which committed positions `[B, S]` and nodes on the path `[B, M, N]` are at `first` or after it."""
        first, length = first[:, None], self.length[:, None]
        position = torch.arange(self.window, device=self.tokens.device)
        committed = (position >= first) & (position < length)
        return committed, self.tree.ancestors & (length + self.tree.depth >= first)[:, None]

    def sequences(self) -> Tensor:
        """Return the sequence that each node's draw continues: the row's committed tokens, then the path to the node.

        Ids are by position, -1 after the node's own token, `[B, M, window + N - 1]` int64, wide enough for any
        sequence.
        """
        rows, new, nodes = self.tree.ancestors.shape
        positions = torch.arange(self.window + nodes - 1, device=self.tokens.device)
        return self.at(positions.expand(rows, new, -1))


def marks(tokens: Tensor, keep: Tensor, vocabulary: int) -> Tensor:
    """Mark the ids `[..., L]` where `keep` `[..., L]` is true, `[..., V]` bool; ids past the vocabulary are ignored."""
    index = torch.where(keep, tokens.clamp(max=vocabulary), vocabulary)  # other ids go to a spare column
    return keep.new_zeros(*index.shape[:-1], vocabulary + 1).scatter(-1, index, True)[..., :vocabulary]
