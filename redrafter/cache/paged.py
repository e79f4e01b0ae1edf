"""Keys and values in blocks that any row may hold, so that memory is shared and prefixes are computed once."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor

from redrafter import kernels
from redrafter.attention.prefill import PagedPrompt, Piece
from redrafter.attention.tree_attention import Plan
from redrafter.cache.block_manager import BlockTable
from redrafter.cache.dense import DenseCache, LayerShape, group_by_shape
from redrafter.errors import CacheFullError
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.tree.token_tree import Tree

__all__ = ["KVCache", "KVCachePool", "PagedCache", "stack_block_tables"]


class KVCachePool:
    """The memory of one model: pools of `count` blocks.

    All layers whose keys or values have one shape share a pool `[G, blocks * BLOCK_SIZE, heads, dim]`, so that
    committing a path is one gather and one scatter a pool. Block 0 belongs to nobody: idle rows and padding write
    there.
    """

    def __init__(self, shapes: Sequence[LayerShape], num_blocks: int):
        self.num_blocks = num_blocks
        self.pools: list[Tensor] = []
        stores: dict[tuple[int, str], tuple[Tensor, int]] = {}
        for (heads, dim, dtype, device), members in group_by_shape(shapes).items():
            self.pools.append(
                torch.zeros(len(members), num_blocks * BLOCK_SIZE, heads, dim, dtype=dtype, device=device)
            )
            stores |= {member: (self.pools[-1], index) for index, member in enumerate(members)}
        sources = [i if shape.heads else shape.source for i, shape in enumerate(shapes)]
        self.layer_pools = tuple(None if i is None else (*stores[i, "keys"], *stores[i, "values"]) for i in sources)

    @staticmethod
    def block_bytes(shapes: Sequence[LayerShape]) -> int:
        """Bytes of one block over all layers."""
        return BLOCK_SIZE * sum(s.heads * (s.key_dim + s.value_dim) * s.dtype.itemsize for s in shapes)

    @classmethod
    def in_free_memory(
        cls, models: Sequence[Sequence[LayerShape]], *, fraction: float, max_blocks: int
    ) -> list["KVCachePool"]:
        """One for each model, of the same count: at most `most` blocks, in at most `fraction` of their device's memory
        that is free now. models: what their layers store."""
        free = _free_memory(models[0][0].device)
        count = min(int(free * fraction) // sum(map(cls.block_bytes, models)), max_blocks + 1)
        if count < 2:
            raise CacheFullError(
                f"{free / 2**30:.2f} GiB of memory are free, and kv_cache_free_gpu_memory_fraction={fraction} of "
                "it holds not one block of keys and values: raise it, or free memory"
            )
        return [cls(shapes, count) for shapes in models]


class PagedCache:
    """The rows of one batch: a store, and the blocks of each row, `table` `[B, M]` int32, 0 where a row has none.

    What is here has fixed shapes and reads nothing on the host, so it may stand in a CUDA graph.
    """

    def __init__(self, pool: KVCachePool, table: Tensor):
        self.pool, self.table = pool, table
        self.window = table.shape[1] * BLOCK_SIZE

    def plan(self, tree: Tree, length: Tensor, windows: tuple[int, ...]) -> Plan:
        """Return what attention must know of a forward over `tree`'s new nodes.

        Args:
            tree: the nodes.
            length: `[B]` int64, committed tokens of each row.
            windows: positions that each layer looks back, 0 for all.
        """
        return Plan(self.pool.layer_pools, windows, *map(_spare, (length, tree.depth, tree.ancestors, self.table)))

    @contextmanager
    def subset(self, rows: Tensor, slots: int) -> Iterator["PagedCache"]:
        """Give the cache of these rows alone, `[B']` int64, to be written from their first slot on."""
        yield PagedCache(self.pool, self.table[rows])

    def plan_prefill(self, forward: Sequence[Piece]) -> PagedPrompt:
        """Where the tokens of a forward over pieces of prompts go, and where those are that they see."""
        return PagedPrompt.of(self.pool.layer_pools, self.table, forward)

    def commit(self, length: Tensor, nodes: Tensor) -> None:
        """Move the path's keys and values next to the committed ones, as `DenseCache.commit` does."""
        if nodes.shape[1] == 1:
            return  # node 0 already stands where it belongs
        if kernels.TRITON and length.is_cuda:
            for pool in self.pool.pools:
                kernels.commit(pool, self.table, length, nodes)
            return
        source = self.slots(length[:, None] + nodes)
        target = self.slots(length[:, None] + torch.arange(nodes.shape[1], device=nodes.device))
        for pool in self.pool.pools:
            pool.index_copy_(1, target, pool.index_select(1, source))

    def slots(self, at: Tensor) -> Tensor:
        """Map slots `[B, M']` counted along each row, to flat ones of the pools, `[B * M']`."""
        return (self.table.gather(1, at // BLOCK_SIZE) * BLOCK_SIZE + at % BLOCK_SIZE).flatten()


def stack_block_tables(block_tables: Sequence[BlockTable], device: torch.device) -> Tensor:
    """The blocks of some rows as a cache's table, `[B, M]` int32."""
    width = max(len(table.blocks) for table in block_tables)
    rows = [table.blocks + [0] * (width - len(table.blocks)) for table in block_tables]
    return torch.tensor(rows, dtype=torch.int32).to(device)


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return psutil.virtual_memory().available


def _spare(x: Tensor) -> Tensor:
    """Flat, with one entry more; see `Plan`."""
    return torch.cat([x.flatten(), x.new_zeros(1)])


KVCache: TypeAlias = DenseCache | PagedCache
"""Keys and values of `B` rows, in either form."""
