"""Attention of token trees in an order that depends only on the positions of a sequence.

Whether a token is a node of a tree, in a chunk of a prompt or alone, and whatever else is in its forward, the same
numbers are added in the same order: its keys are visited by position, in tiles and splits at fixed positions.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn.functional import pad

from redrafter import kernels
from redrafter.attention.tree_plan import attention_operator
from redrafter.kernels.attention_inputs import FAR_SPLIT, NEAR, NEAR_SPLIT, TILE, AttentionInputs, TokenRows
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.kernels.cache_format import read_slots, write_slots
from redrafter.kernels.invariant_linear import in_full_vectors

TOKENS = 8  # tokens of every product: a batch with another number of matrices may be multiplied in another order


def invariant_attention_reference(inputs: AttentionInputs) -> Tensor:
    """Store the new keys and values, and attend from each token to the positions of its sequence in order.

    This is the slow reference, for any device; a GPU uses Triton kernels instead. For a node after n committed tokens,
    the key at position s is that of token s if s < n, else that of the node's ancestor at depth s - n. Tiles of 64
    positions begin at position 0. Positions below 4,096 are in splits of 128, later ones in splits of 512; each split
    begins with an empty state and adds its tiles in order, and the states are folded in the order of the splits. Sinks
    come last. Positions that a token does not see have a weight of exactly 0, so tiles and splits without any visible
    position change nothing. All sums are in float32.
    """
    assert not inputs.first, "a model's layers attend from the first token on"
    assert not inputs.sees_later, "a model's tokens see none after them"
    assert not inputs.chunk_size, "models that attend within chunks are refused by `batch_invariance.support_of`"
    places = _Places.from_rows(inputs.rows)
    count = len(places.end)
    for store, x in inputs.sides():
        write_slots(store, places.new_slots(), x[:count])
    out = inputs.new_output().zero_()
    for first in range(0, count, TOKENS):
        block = slice(first, min(first + TOKENS, count))
        out[block] = _attend(inputs.query[block], inputs, places.at(block)).to(out.dtype)
    return out


invariant_attention = attention_operator(
    "invariant_attention",
    invariant_attention_reference,
    kernels.ordered_attention.ordered_attention if kernels.TRITON else None,
)


class _Places(NamedTuple):
    """Locates the positions of the sequences of T tokens in the pools.

    Attributes:
        table: Blocks of each token's sequence in order of position, `[T, blocks]` int64.
        own: Offset of each token's own key along its row, `[T]` int64.
        end: Position after each token, `[T]` int64.
        committed: Number of positions of each token's sequence whose offset equals the position, `[T]` int64.
        path: Offset along its row of each token's ancestor at each depth, `[T, N]` int64; used from `committed` on.
    """

    table: Tensor
    own: Tensor
    end: Tensor
    committed: Tensor
    path: Tensor

    @classmethod
    def from_rows(cls, rows: TokenRows) -> "_Places":
        """Find the places of the tokens that are no padding."""
        (count, nodes, new, chunks), starts, chunk_starts = rows.sizes, rows.starts, rows.chunk_starts
        length, depth, seen, table = rows.by_row()
        # 1. The nodes of trees: an ancestor at depth k is at the offset of its index among the nodes.
        offsets = length[:, None] + torch.arange(nodes, device=length.device)  # [B, N]
        there = (offsets[:, None] * seen).long()
        path = torch.zeros_like(there).scatter_reduce_(2, depth[:, None].expand_as(there), there, "amax")
        row, node = _owners(starts, count)
        in_tree = cls(
            table=table.long()[row],
            own=offsets[row, nodes - new + node],
            end=(length[:, None] + depth)[row, nodes - new + node] + 1,
            committed=length[row],
            path=path[row, node],
        )
        # 2. The tokens of chunks: each position is at the offset of the same number.
        chunk, index = _owners(chunk_starts, chunks)
        own = rows.chunk_lengths[chunk] + index
        end = own + 1
        in_chunk = cls(
            table=rows.by_chunk().long()[chunk], own=own, end=end, committed=end, path=path.new_zeros(len(own), nodes)
        )
        width = max(in_tree.table.shape[1], in_chunk.table.shape[1])
        tables = torch.cat([pad(x.table, (0, width - x.table.shape[1])) for x in (in_tree, in_chunk)])
        return cls(tables, *map(torch.cat, zip(in_tree[1:], in_chunk[1:], strict=True)))

    def at(self, tokens: slice) -> "_Places":
        """Return the locations of `TOKENS` tokens; the last ones may be padding that sees nothing."""
        return _Places(*(_padded(x[tokens]) for x in self))

    def new_slots(self) -> Tensor:
        """Return the slot of each token, `[T]` int64."""
        return self._slots(self.own[:, None])[:, 0]

    def slots(self, positions: Tensor) -> Tensor:
        """Return the slots of positions `[S]` of each token's sequence, `[T, S]` int64; undefined after the token."""
        positions = positions.expand(len(self.end), -1)
        level = (positions - self.committed[:, None]).clamp(0, self.path.shape[1] - 1)
        return self._slots(torch.where(positions < self.committed[:, None], positions, self.path.gather(1, level)))

    def _slots(self, offsets: Tensor) -> Tensor:
        """Return the slots of offsets along each token's row, `[T, S]` int64; past its last block, slots of block 0."""
        index, width = offsets // BLOCK_SIZE, self.table.shape[1]
        blocks = self.table.gather(1, index.clamp(max=width - 1)).where(index < width, 0)
        return blocks * BLOCK_SIZE + offsets % BLOCK_SIZE


def _owners(starts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the run of each token, out of `count`, and its index there, `[T]` int64 each; starts: `[count + 1]`."""
    starts = starts[: count + 1]
    sizes = starts[1:] - starts[:-1]
    owner = torch.repeat_interleave(sizes)
    return owner, torch.arange(len(owner), device=starts.device) + (starts[0] - starts)[owner]


def _padded(x: Tensor) -> Tensor:
    """Return `[M, ...]` padded with zeros to `TOKENS` entries."""
    return torch.cat([x, x.new_zeros(TOKENS - len(x), *x.shape[1:])])


class _State(NamedTuple):
    """The state of a softmax over some positions: the highest score, the sum of weights, and the weighted values.

    Attributes:
        top: Highest score, `[M, H, G, 1]`; minus infinity for none.
        total: Sum of the weights relative to it, `[M, H, G, 1]`.
        acc: Sum of the values times their weights, `[M, H, G, dv]`.
    """

    top: Tensor
    total: Tensor
    acc: Tensor

    @classmethod
    def empty(cls, query: Tensor, width: int) -> "_State":
        """Return the state over no positions, for queries `[M, H, G, d]` and values of `width` numbers."""
        total = query.new_zeros(*query.shape[:-1], 1)
        return cls(torch.full_like(total, -torch.inf), total, query.new_zeros(*query.shape[:-1], width))

    def and_then(self, top: Tensor, total: Tensor, acc: Tensor) -> "_State":
        """Return the state over this state's positions and later ones with another state."""
        new = torch.maximum(self.top, top)
        before, after = _exp(self.top - _finite(new)), _exp(top - _finite(new))
        return _State(new, self.total * before + total * after, self.acc * before + acc * after)

    def and_tile(self, scores: Tensor, value: Tensor) -> "_State":
        """Return the state over this state's positions and a tile: scores `[M, H, G, 64]`, values `[M, H, 64, dv]`."""
        new = torch.maximum(self.top, scores.amax(-1, keepdim=True))
        before, weights = _exp(self.top - _finite(new)), _exp(scores - _finite(new))
        total = self.total * before + weights.sum(-1, keepdim=True)
        return _State(new, total, self.acc * before + weights @ value)


def _exp(x: Tensor) -> Tensor:
    return in_full_vectors(torch.exp, x)


def _finite(top: Tensor) -> Tensor:
    """Return highest scores with 0 in place of minus infinity, as -inf - -inf is NaN."""
    return top.masked_fill(top == -torch.inf, 0)


def _attend(query: Tensor, inputs: AttentionInputs, places: _Places) -> Tensor:
    """Attend from at most `TOKENS` tokens in the reference's order.

    Returns `[M, Hq, dv]` in float32 for queries `[M, Hq, d]`; `places` also has entries for padding.
    """
    stores, window, softcap, sinks = (inputs.keys, inputs.values), inputs.window, inputs.softcap, inputs.sinks
    count, heads = len(query), stores[0].shape[1]
    q = rearrange(_padded(query).float(), "m (h g) d -> m h g d", h=heads)
    begin = (places.end - window).clamp(min=0) if window else torch.zeros_like(places.end)
    last, seen_first = int(places.end.max()), int(begin[:count].min())
    state = _State.empty(q, stores[1].shape[-1])
    for split in splits(last):
        inside = _State.empty(q, stores[1].shape[-1])
        for first in range(split.start, min(split.stop, last), TILE):
            if first + TILE <= seen_first:
                continue  # no token sees this tile
            positions = torch.arange(first, first + TILE, device=query.device)
            visible = (positions < places.end[:, None]) & (positions >= begin[:, None])  # [M, 64]
            slots = places.slots(positions)
            k, v = (rearrange(read_slots(x, slots, torch.float32).float(), "m s h d -> m h s d") for x in stores)
            scores = (q @ k.mT) * inputs.scale
            if softcap:
                scores = softcap * in_full_vectors(torch.tanh, scores / softcap)
            # Values are zeroed too: a weight of 0 does not hide a NaN of a token that must not be seen.
            hidden = ~visible[:, None]
            inside = inside.and_tile(
                scores.masked_fill(hidden[:, :, None], -torch.inf), v.masked_fill(hidden[..., None], 0)
            )
        state = state.and_then(*inside)
    if sinks is not None:
        top = repeat(sinks.float(), "(h g) -> m h g 1", m=TOKENS, h=heads)
        state = state.and_then(top, torch.ones_like(top), torch.zeros_like(state.acc))
    out = state.acc / state.total.where(state.total > 0, 1)
    return rearrange(out, "m h g d -> m (h g) d")[:count]


def splits(end: int) -> Iterator[range]:
    """Yield the positions of each split up to position `end`, in order."""
    first = 0
    while first < end:
        size = NEAR_SPLIT if first < NEAR else FAR_SPLIT
        yield range(first, first + size)
        first += size
