"""Attention of drafts to a drafter's entries in a paged cache, by the kernel that verification uses.

An entry is a key and a value that a drafter has of a token. Those of committed tokens are finished when the target
computes the tokens, and stored with the target's own keys and values (`DrafterLayer`). Those of drafts go to the slots
after a row's committed tokens, where verification writes later: node i of a search to slot n + i. So a search copies no
entry, and reads each row's committed ones in blocks, as many as there are.
"""

from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn.functional import pad

from redrafter.attention.tree_attention import tree_attention
from redrafter.cache.kv_cache import KVCache
from redrafter.cache.paged import PagedCache, flatten_with_spare
from redrafter.kernels.attention_inputs import TokenRows


class PagedEntries(NamedTuple):
    """The entries of the committed tokens of B rows, and of their drafts.

    Attributes:
        keys: A layer's part of the pool of keys, `[1, slots, H, d]`.
        values: The same of values, `[1, slots, H, dv]`.
        length: Committed tokens of each row, and a spare entry, as `TokenRows` has them, `[B + 1]` int64.
        table: Blocks of each row in order of position, and a spare entry, `[B*M + 1]` int32.
        first: The first committed token that has an entry: 1 where an entry reads the token before.
        sees_later: Whether nodes see nodes after them, as positions of a block do.
    """

    keys: Tensor
    values: Tensor
    length: Tensor
    table: Tensor
    first: int
    sees_later: bool = False

    @classmethod
    def from_cache(cls, cache: KVCache, length: Tensor, first: int = 1, *, sees_later: bool = False) -> "PagedEntries":
        """Return the entries of rows with `length` `[B]` int64 committed tokens."""
        keys, values = (store[None] for store in cache.stores(-1)[:2])
        return cls(keys, values, flatten_with_spare(length), flatten_with_spare(cache.table), first, sees_later)

    def rows(self, seen: Tensor, depth: Tensor | None = None) -> TokenRows:
        """Return new nodes of each row as attention takes them. Layers and levels may share the result.

        Args:
            seen: Which of the row's nodes each of w new ones attends to, after n earlier ones, `[B, w, n + w]` bool.
            depth: Depth of each node below the root, `[B, n + w]` int64, which a window needs; None without one.
        """
        rows, beams, nodes = seen.shape
        starts = torch.arange(rows + 1, device=seen.device) * beams
        # Without a window the kernel reads its size alone, so it is not filled.
        depths = starts.new_empty(rows * nodes + 1) if depth is None else flatten_with_spare(depth)
        no_chunks = self.length[:2]  # of prompts: their number, 0, follows from the shape, and nothing is read
        ancestors = flatten_with_spare(seen)
        return TokenRows(self.length, starts, depths, ancestors, self.table, no_chunks, no_chunks, self.table)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: TokenRows,
        *,
        scale: float | None = None,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store the entries of w new nodes of each row, and attend from them.

        A node attends to all committed tokens, and to the nodes that it sees. The first two dimensions of queries, keys
        and values may be any with as many nodes.

        Args:
            query: `[B, w, h, d]`.
            key: `[B, w, H, d]`.
            value: `[B, w, H, dv]`.
            rows: The nodes, as `rows` returns them.
            scale: Multiplier of the products of queries and keys; None for the root of 1/d.
            window: Positions that a node sees, back from its own; 0 for all. It needs the depths of `rows`.
            softcap: Bound of the scores; 0 for none.
            sinks: Score of each head's attention sink, `[h]`; None for none.

        Returns:
            The attended values, `[B, w, h, dv]`.
        """
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        own = (x.flatten(0, 1) for x in (query, key, value))
        form = scale, window, softcap, sinks, 0, self.first, self.sees_later
        attended: Tensor = tree_attention(*own, self.keys, 0, self.values, 0, *rows, *form)
        return torch.unflatten(attended, 0, query.shape[:2])


def reads_pages(cache: KVCache) -> TypeGuard[PagedCache]:
    """Return whether drafts attend through `PagedEntries`: on a GPU. On a CPU, entries are copied once for a search."""
    return isinstance(cache, PagedCache) and cache.table.is_cuda


def with_themselves(path: Tensor | None, rows: int, beams: int, device: torch.device) -> Tensor:
    """Return which nodes the beams of a search attend to: those on their paths, and themselves.

    Args:
        path: Which of n earlier nodes each beam descends from, `[B, w, n]` bool; None for the first nodes.
        rows: B.
        beams: w.
        device: Where the result goes.

    Returns:
        `[B, w, n + w]` bool.
    """
    earlier = 0 if path is None else path.shape[2]
    own = torch.arange(earlier + beams, device=device) == earlier + torch.arange(beams, device=device)[:, None]
    # Padded and not concatenated, as a compiler then computes all of it in one kernel.
    return own.expand(rows, -1, -1) if path is None else pad(path, (0, beams)) | own
