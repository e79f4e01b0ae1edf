"""Inputs of attention over a paged cache, declared once for the operators, their slow references and the kernels."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

TOKEN_MULTIPLE = 8  # tokens of a forward are padded to it: matrix products are faster, and none has one token
TOKENS_PER_CHUNK = 16  # tokens per prompt chunk in a forward's buffers; a single chunk may have more

# Batch-invariant attention starts new splits at positions that depend on positions only.
TILE = 64  # positions that are weighted together
NEAR = 4096  # positions below this have short splits
NEAR_SPLIT, FAR_SPLIT = 128, 512  # positions of a split below and from `NEAR` on


class TokenRows(NamedTuple):
    """The T tokens of a forward: the last M of a tree's N nodes for each of B rows, and P chunks of prompts.

    The new nodes come first, row by row, then the chunks, then padding. A row may have fewer nodes than N: in a ragged
    tree, only the first ones are tokens. All tensors are flat, each with one spare entry at its end, since a compiler
    specialises dimensions of size 1.

    Attributes:
        length: Committed tokens of each row, `[B + 1]` int64.
        starts: Index of the first token of each row, and of the token after the last row, `[B + 1]` int64.
        depth: Depth of each node below the root, `[B*N + 1]` int64.
        ancestors: Whether a node is each new node's ancestor or the node itself, `[B*M*N + 1]` bool.
        table: Blocks of each row in order of position, `[B*blocks + 1]` int32.
        chunk_starts: Index of the first token of each chunk, of the padding, and of the end, `[P + 2]` int64. Padding
            is treated as one more chunk, which uses block 0.
        chunk_lengths: Tokens of each chunk's prompt that are cached already, `[P + 2]` int64.
        chunk_table: Blocks of each chunk's prompt, `[(P + 1)*blocks + 1]` int32.
    """

    length: Tensor
    starts: Tensor
    depth: Tensor
    ancestors: Tensor
    table: Tensor
    chunk_starts: Tensor
    chunk_lengths: Tensor
    chunk_table: Tensor

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, N, M and P: rows, nodes of a tree, new nodes of a tree, and chunks."""
        rows = self.length.shape[0] - 1
        nodes = (self.depth.shape[0] - 1) // rows
        return rows, nodes, (self.ancestors.shape[0] - 1) // (rows * nodes), self.chunk_starts.shape[0] - 2

    def by_row(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return `length` `[B]`, `depth` `[B, N]`, `ancestors` `[B, M, N]` and `table` `[B, blocks]`."""
        rows, nodes, new, _ = self.sizes
        ancestors = self.ancestors[:-1].view(rows, new, nodes)
        return self.length[:-1], self.depth[:-1].view(rows, nodes), ancestors, self.table[:-1].view(rows, -1)

    def by_chunk(self) -> Tensor:
        """Return `chunk_table` as `[P + 1, blocks]`."""
        return self.chunk_table[:-1].view(self.chunk_starts.shape[0] - 1, -1)


@dataclass(frozen=True)
class AttentionInputs:
    """The arguments of attention in one layer; the output is `[T, Hq, dv]`.

    Attributes:
        query: Queries, `[T, Hq, d]`.
        key: New keys, `[T, H, d]`, which are stored.
        value: New values, `[T, H, dv]`, which are stored.
        keys: The layer's part of the cache, `[slots, H, d]`.
        values: The same of values, `[slots, H, dv]`.
        rows: Positions of the tokens in rows, and each row's blocks.
        scale: Multiplier of the products of queries and keys.
        window: Positions that a token sees, back from its own; 0 for all.
        softcap: Bound of the scores; 0 for none.
        sinks: Score of each head's attention sink, `[Hq]`; None for none.
        chunk_size: Positions of a chunk; a token sees nothing outside of its chunk. 0 for no chunks.
        first: First committed token that any token sees. Only `tree_attention` supports values other than 0.
        sees_later: Whether a node may see new nodes after it, as positions of a block do; only in `tree_attention`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    keys: Tensor
    values: Tensor
    rows: TokenRows
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    chunk_size: int = 0
    first: int = 0
    sees_later: bool = False

    @classmethod
    def from_arguments(
        cls, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, key_layer: int, values: Tensor, value_layer: int,
        *rest: Any, **settings: Any,
    ) -> "AttentionInputs":  # fmt: skip
        """Gather the arguments of an operator: keys and values are each passed as a pool and the layer's index in it.

        `rest` are the tensors of `TokenRows`, and the settings in their order.
        """
        rows, settings_in_order = TokenRows(*rest[:8]), rest[8:]
        return cls(query, key, value, keys[key_layer], values[value_layer], rows, *settings_in_order, **settings)

    def sides(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the layer's part of the cache and the new tensor, for keys and then for values."""
        yield self.keys, self.key
        yield self.values, self.value

    @property
    def heads(self) -> tuple[int, int]:
        """H, and the number of query heads that share a key head."""
        return self.value.shape[1], self.query.shape[1] // self.value.shape[1]

    def new_output(self) -> Tensor:
        """Return an uninitialised output, `[T, Hq, dv]`."""
        return self.query.new_empty(self.query.shape[0], self.query.shape[1], self.value.shape[-1])
