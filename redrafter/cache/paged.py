"""A KV cache in blocks shared by all rows, in which a common prefix is computed and stored once."""

import gc
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

import psutil
import torch
from torch import Tensor
from transformers import DynamicCache

from redrafter import kernels
from redrafter.attention.mask import AttentionKind
from redrafter.attention.prompt_attention import Piece, PromptPlan
from redrafter.attention.tree_plan import Plan, PromptChunks
from redrafter.cache.block_manager import BlockTable
from redrafter.cache.kv_cache import KVCache, LayerShape, allocate, states_of
from redrafter.cache.states import NO_SNAPSHOTS, RowStates, Snapshots, StatesOfRows
from redrafter.cache.to_device import to_device
from redrafter.errors import CacheFullError
from redrafter.kernels.attention_inputs import TokenRows
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.kernels.cache_format import as_bytes, round_trip
from redrafter.parallel.ranks import ALONE, Ranks
from redrafter.tree.token_tree import Tree, chain


class KVCachePool:
    """The memory for keys and values of one model, in blocks of `BLOCK_SIZE` slots.

    All layers whose keys or values have the same shape share a tensor, so that committing a path is one gather and one
    scatter per tensor. Block 0 belongs to no row: idle rows and padding write there.

    Attributes:
        num_blocks: Number of blocks, block 0 included.
        has_drafter_layer: Whether the last layer stores a drafter's values.
        fp8: Storage format of the model's keys and values if it is FP8; else None.
        pools: The tensors, `[G, num_blocks * BLOCK_SIZE, heads, dim]` each.
        movable: The same tensors, as in `KVCache.movable`.
        states: Recurrent states of rows, followed by those at the ends of stored prefixes; row 0 belongs to no row.
            None for a model without.
        prefix_states: Number of stored prefixes that may have states.
        layer_pools: Per layer, the tensor and index in it of the keys that the layer attends to, then of the values;
            None for a layer that attends to no earlier tokens.
        stores: Per layer, the result of `KVCache.stores`.
    """

    def __init__(self, shapes: Sequence[LayerShape], num_blocks: int, rows: int = 8, prefix_states: int = 0):
        """Allocate the memory, filled with zeros, and recurrent states of rows and prefixes if layers have some."""
        kept = states_of(shapes)
        self.states, self.prefix_states = None, prefix_states
        if kept:
            self.states = RowStates(kept, 1 + rows + prefix_states)
        self.num_blocks, self.has_drafter_layer = num_blocks, shapes[-1].of_drafter
        self.fp8 = next((s.dtype for s in shapes if s.heads and s.dtype.itemsize == 1), None)
        self.pools, places = allocate(shapes, num_blocks * BLOCK_SIZE)
        self.movable = [as_bytes(pool) for pool in self.pools]
        sources = [i if shape.heads else shape.source for i, shape in enumerate(shapes)]
        homes = [None if i is None else places[i] for i in sources]
        self.layer_pools = tuple(
            None if home is None else (self.pools[home[0][0]], home[0][1], self.pools[home[1][0]], home[1][1])
            for home in homes
        )
        self.stores = [() if home is None else tuple(self.pools[pool][index] for pool, index in home) for home in homes]

    @property
    def rows(self) -> int | None:
        """The most rows that may have recurrent states at once; None where no layer keeps any."""
        return None if self.states is None else len(self.states.position) - 1 - self.prefix_states

    @staticmethod
    def block_bytes(shapes: Sequence[LayerShape]) -> int:
        """Return the bytes of one block, summed over all layers."""
        return BLOCK_SIZE * sum((s.heads * (s.key_dim + s.value_dim) + s.extra_dim) * s.dtype.itemsize for s in shapes)

    @classmethod
    def in_free_memory(
        cls,
        models: Sequence[Sequence[LayerShape]],
        *,
        scales: Sequence[int],
        fraction: float,
        max_blocks: int,
        max_rows: int,
        prefix_states: int = 0,
        ranks: Ranks = ALONE,
    ) -> list["KVCachePool"]:
        """Allocate one pool for each model in the memory that is free now.

        Args:
            models: Shapes of the layers of each model.
            scales: Number of blocks of each model for one of the first model.
            fraction: Part of the device's free memory to use, from 0 to 1.
            max_blocks: The most blocks that rows can need of the first model, without block 0.
            max_rows: The most rows that can have recurrent states at once; they take half of the memory at most.
            prefix_states: The most stored prefixes that can have states; they take a quarter of the memory at most.
            ranks: Processes that each have a pool with the same number of blocks.

        Raises:
            CacheFullError: There is no memory for a single block, or for the states of a single row.
        """
        # All ranks must hold the same blocks, so the one with least memory decides.
        free = ranks.minimum(_free_memory(models[0][0].device, ranks))
        memory = int(free * fraction)
        row_bytes = sum(state.num_bytes for shapes in models for state in states_of(shapes))
        # Half of the memory at most, as the rest is for keys and values. Row 0 of the store belongs to no row.
        rows = min(memory // (2 * row_bytes) - 1, max_rows) if row_bytes else max_rows
        prefix_states = min(memory // (4 * row_bytes), prefix_states) if row_bytes else 0
        block_bytes = sum(scale * cls.block_bytes(shapes) for shapes, scale in zip(models, scales, strict=True))
        left = memory - (rows + 1 + prefix_states) * row_bytes
        num_blocks = min(left // block_bytes, max_blocks + 1) if block_bytes else max_blocks + 1
        if num_blocks < 2 or rows < 1:
            raise CacheFullError(
                f"{free / 2**30:.2f} GiB of memory are free, and kv_cache_free_gpu_memory_fraction={fraction} of "
                "it is less than one block of keys and values: raise it, or free memory"
            )
        return [cls(shapes, n * num_blocks, rows, prefix_states) for shapes, n in zip(models, scales, strict=True)]


class PagedCache(KVCache):
    """Keys and values of the rows of a batch, in blocks of a pool.

    All shapes are fixed and no value is read on the host, so its methods can be captured in a CUDA graph.

    Attributes:
        pool: The memory of the blocks.
    """

    def __init__(
        self, pool: KVCachePool, table: Tensor, rows: Tensor | None = None, snapshots: Snapshots = NO_SNAPSHOTS
    ):
        """Make a cache of blocks `[B, M]` int32; recurrent states, if any, are in `rows` `[B]` int64 of the pool."""
        self.pool, self.table, self.has_drafter_layer = pool, table, pool.has_drafter_layer
        self.pools, self.movable = pool.pools, pool.movable
        self.window = table.shape[1] * BLOCK_SIZE
        self.states = None
        if pool.states is not None:
            rows = torch.zeros(len(table), dtype=torch.long, device=table.device) if rows is None else rows
            self.states = StatesOfRows(pool.states, rows, snapshots)

    def plan(
        self, tree: Tree, length: Tensor, windows: tuple[int, ...], chunks: PromptChunks | None, tokens: int
    ) -> Plan:
        """Return the attention plan of a forward of `tokens` tokens: new nodes of a tree and chunks of prompts."""
        row_starts, end = tree.row_starts, length.new_full((1,), tokens)
        chunk_starts, (chunk_lengths, chunk_table) = torch.cat([row_starts[-1:], end]), self._padding
        if chunks is not None:
            chunk_starts = torch.cat([row_starts[-1] + chunks.starts, end])
            chunk_lengths = torch.cat([chunks.lengths, chunk_lengths])
            chunk_table = torch.cat([chunks.table.flatten(), chunks.table.new_zeros(chunks.table.shape[1] + 1)])
        length, depth, ancestors, table = map(flatten_with_spare, (length, tree.depth, tree.ancestors, self.table))
        chunked = chunk_starts, chunk_lengths, chunk_table
        return Plan(self.pool.layer_pools, windows, TokenRows(length, row_starts, depth, ancestors, table, *chunked))

    @cached_property
    def _padding(self) -> tuple[Tensor, Tensor]:
        """The number of cached tokens and the block table of the chunk that is padding, each with a spare entry.

        All plans share them, so never write to them.
        """
        return self.table.new_zeros(2, dtype=torch.long), self.table.new_zeros(self.table.shape[1] + 1)

    def plan_chains(self, tree: Tree, length: Tensor, windows: tuple[int, ...], tokens: int) -> Plan:
        """Return the attention plan of a forward over chains only: each chain is a chunk, and there are no trees."""
        no_tree = replace(chain(tree.tokens[:1, :1]), counts=torch.zeros_like(length[:1]), total=0)
        chunks = PromptChunks(tokens=tree.tokens, starts=tree.row_starts, lengths=length, table=self.table, inputs={})
        # A plan always has a tree. This one has no token, by its count, and its table names block 0, which no row
        # holds.
        nowhere = PagedCache(self.pool, torch.zeros_like(self.table[:1]))
        return nowhere.plan(no_tree, torch.zeros_like(length[:1]), windows=windows, chunks=chunks, tokens=tokens)

    @contextmanager
    def subset(self, rows: Tensor, slots: int) -> Iterator["PagedCache"]:
        """Yield the cache of rows `[B']` int64 only, to be rewritten from their first slot on."""
        yield PagedCache(self.pool, self.table[rows], None if self.states is None else self.states.rows[rows])

    def plan_prefill(self, pieces: Sequence[Piece], kinds: Sequence[AttentionKind]) -> PromptPlan:
        """Look up the slots where a forward over pieces of prompts stores its tokens, and those it attends to."""
        positions = torch.arange(max(piece.end for piece in pieces))
        blocks, offsets = positions // BLOCK_SIZE, positions % BLOCK_SIZE
        seen = [self.table[p.row].long()[blocks[: p.end]] * BLOCK_SIZE + offsets[: p.end] for p in pieces]
        new = torch.cat([slots[p.first :] for p, slots in zip(pieces, seen, strict=True)])
        return PromptPlan(pieces, kinds, new=new, pools=self.pool.layer_pools, seen=seen)

    def commit(self, length: Tensor, nodes: Tensor) -> None:
        """Move the keys and values of accepted nodes as `KVCache.commit` does, on a GPU with one launch per pool."""
        if not (kernels.TRITON and length.is_cuda and nodes.shape[1] > 1):
            return super().commit(length, nodes)
        for pool in self.pools:
            kernels.cache_tiles.commit(pool, self.table, length, nodes)

    def stores(self, layer: int) -> tuple[Tensor, ...]:
        """Return the keys and values that a layer attends to, as `KVCache.stores` defines."""
        return self.pool.stores[layer]

    def slots(self, row_slots: Tensor) -> Tensor:
        """Map slots counted along each row, `[B, M']`, to slots of the pools, `[B * M']`."""
        blocks = self.table.gather(1, row_slots // BLOCK_SIZE)
        return (blocks * BLOCK_SIZE + row_slots % BLOCK_SIZE).flatten()


def stack_block_tables(block_tables: Sequence[BlockTable], device: torch.device, width: int | None = None) -> Tensor:
    """Return the blocks of several rows in one tensor `[B, M]` int32, padded with 0, or cut at `width`."""
    if width is None:
        width = max(len(table.blocks) for table in block_tables)
    rows = torch.zeros(len(block_tables), width, dtype=torch.int32)
    for row, table in zip(rows, block_tables, strict=True):
        # Through an array, since torch takes many times as long to read a list: 128k tokens have 8,192 blocks.
        blocks = torch.frombuffer(array("i", table.blocks), dtype=torch.int32)[:width]
        row[: len(blocks)] = blocks
    return to_device(rows, device)


def _free_memory(device: torch.device, ranks: Ranks) -> int:
    gc.collect()  # an engine that nobody holds any more may be part of cycles, and so its cache
    if device.type == "cuda":
        # The driver counts memory in torch's cache as used, so the pool would be smaller by it.
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available // ranks.size  # ranks on a CPU share its memory


def flatten_with_spare(x: Tensor) -> Tensor:
    """Return a flat copy with one more entry at its end, as `TokenRows` requires; nothing reads its value."""
    return torch.cat([x.flatten(), x.new_empty(1)])


class RoundingCache(DynamicCache):
    """A cache for the model's own forward, in which keys and values are rounded before attention reads them."""

    def __init__(self, dtype: torch.dtype):
        """Begin without tokens."""
        super().__init__()
        self._dtype = dtype

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values of a layer, rounded, and return all of the layer's, as `Cache.update` does."""
        key_states, value_states = (round_trip(x, self._dtype) for x in (key_states, value_states))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)
