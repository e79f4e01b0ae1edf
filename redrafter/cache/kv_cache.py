"""Keys and values of the rows of a batch: the shapes of layers, and the interface of both kinds of cache."""

import ctypes
import mmap
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from redrafter.attention.mask import AttentionKind
from redrafter.attention.prompt_attention import Piece, PromptPlan
from redrafter.cache.states import StateShape, StatesOfRows
from redrafter.kernels.cache_format import write_slots

MADV_DONTNEED = 4  # of Linux: forget the numbers in pages of memory, which read as zeros from then on


@dataclass(frozen=True)
class LayerShape:
    """Shape of the keys and values that one layer stores per slot, and of the recurrent states that it keeps per row.

    Attributes:
        heads: Key heads; 0 for a layer that stores nothing.
        key_dim: Width of a head's key.
        value_dim: Width of a head's value.
        dtype: Dtype of keys and values.
        device: Device of the layer.
        source: For a layer that stores nothing, the layer to whose keys and values it attends; None if it attends to no
            earlier tokens.
        of_drafter: Whether it stores a drafter's values; such a layer follows the model's own layers.
        extra_dim: Width of a third vector of each slot; 0 without one. An indexer stores keys there, by which it
            chooses the slots that the layer attends to; a drafter, what a token leaves for its entry of the next one.
        states: Recurrent states; none for a layer that only attends.
    """

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    source: int | None = None
    of_drafter: bool = False
    extra_dim: int = 0
    states: tuple[StateShape, ...] = ()

    def widened(self) -> "LayerShape":
        """Return the shape of the layer for computation in float32."""
        states = tuple(replace(state, dtype=torch.float32) for state in self.states)
        return replace(self, dtype=torch.float32, states=states)

    def storing_nothing(self, source: int | None = None) -> "LayerShape":
        """Return the shape of a layer with the dtype and device of this one that stores nothing of its own."""
        return LayerShape(heads=0, key_dim=0, value_dim=0, dtype=self.dtype, device=self.device, source=source)


def states_of(shapes: Sequence[LayerShape]) -> list[StateShape]:
    """Return the recurrent states of all layers."""
    return [state for shape in shapes for state in shape.states]


def stored_as(shapes: Sequence[LayerShape], dtype: torch.dtype | None) -> list[LayerShape]:
    """Return shapes of layers stored in another format, None for their own; a drafter's layers keep their format."""
    return [shape if dtype is None or shape.of_drafter else replace(shape, dtype=dtype) for shape in shapes]


def allocate(shapes: Sequence[LayerShape], slots: int) -> tuple[list[Tensor], list[list[tuple[int, int]]]]:
    """Return pools of zeros, `[G, slots, heads, dim]` each, and the position in them of each layer's keys and values.

    Tensors of one shape, dtype and device share a pool, so that committing a path is one gather and one scatter. A
    layer that stores something has two positions, or three with a third vector: the number of a pool, and the index in
    it.
    """
    sizes: dict[tuple[int, int, torch.dtype, torch.device], int] = {}
    places: list[list[tuple[int, int]]] = [[] for _ in shapes]
    for shape, home in zip(shapes, places, strict=True):
        sides = [(shape.heads, shape.key_dim), (shape.heads, shape.value_dim)] if shape.heads else []
        for heads, dim in sides + ([(1, shape.extra_dim)] if shape.extra_dim else []):
            pool = heads, dim, shape.dtype, shape.device
            index = sizes[pool] = sizes.get(pool, -1) + 1
            home.append((list(sizes).index(pool), index))
    pools = [
        zeros(last + 1, slots, heads, dim, dtype=dtype, device=device)
        for (heads, dim, dtype, device), last in sizes.items()
    ]
    return pools, places


def zeros(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU of Linux, in pages that take no memory before they are written."""
    pool = torch.empty(size, dtype=dtype, device=device)
    begin, end = (-(-x // mmap.PAGESIZE) * mmap.PAGESIZE for x in (pool.data_ptr(), pool.data_ptr() + pool.nbytes))
    whole = end - begin - mmap.PAGESIZE  # bytes of the pages that hold nothing else
    # Writing the zeros takes 3.4 s for the 6 GB of a small model's cache, of which few requests use all.
    if device.type != "cpu" or sys.platform != "linux" or whole <= 0:
        return pool.zero_()
    if ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(whole), MADV_DONTNEED):
        return pool.zero_()
    numbers = pool.view(torch.uint8).flatten()
    numbers[: begin - pool.data_ptr()], numbers[begin - pool.data_ptr() + whole :] = 0, 0
    return pool


class KVCache(ABC):
    """Keys and values of the rows of a batch, in slots of pools that all layers of one shape share.

    Row b's n_b committed tokens are in its slots 0 to n_b - 1; node i of a tree goes to slot n_b + i.

    Attributes:
        window: Slots per row that attention reads, at least every row's length plus the tree.
        has_drafter_layer: Whether the last layer stores a drafter's values.
        states: Recurrent states of the rows; None for a model without.
        for_model: The cache object that the model writes to; None if attention writes.
        table: Blocks of each row in order of position, `[B, M]` int32; 0 where a row has fewer.
    """

    window: int
    has_drafter_layer: bool
    states: StatesOfRows | None
    for_model: Cache | None = None
    table: Tensor
    pools: list[Tensor]  # `[G, slots, heads, dim]` each
    movable: list[Tensor]  # the pools, FP8 ones as bytes, since not every operator that moves data supports FP8

    @abstractmethod
    def slots(self, row_slots: Tensor) -> Tensor:
        """Map slots counted along each row, `[B, M']`, to slots of the pools, `[B * M']`."""

    @abstractmethod
    def stores(self, layer: int) -> tuple[Tensor, ...]:
        """Return the keys that a layer attends to by slot, `[slots, H, d]`, then the values; -1 for the last layer.

        Third vectors follow, `[slots, 1, d]`, for a layer with some.
        """

    @abstractmethod
    def subset(self, rows: Tensor, slots: int) -> AbstractContextManager["KVCache"]:
        """Yield a cache of rows `[B']` int64 only, in which to rewrite their first `slots` slots."""

    @abstractmethod
    def plan_prefill(self, pieces: Sequence[Piece], kinds: Sequence[AttentionKind]) -> PromptPlan:
        """Plan a forward over pieces of prompts, with the kinds of attention of its layers."""

    @property
    def fp8(self) -> torch.dtype | None:
        """Storage format of the model's keys and values if it is FP8; else None."""
        return next((pool.dtype for pool in self.pools if pool.dtype.itemsize == 1), None)

    def fill_first_slots(self, states: Iterable[tuple[int, Sequence[Tensor]]]) -> None:
        """Write keys and values into the first slots of the only row.

        Args:
            states: Layers that store something, each with the keys and values of P tokens, `[1, heads, P, dim]`,
                followed by the keys of an indexer, `[1, P, dim]`, for a layer with one.
        """
        for layer, tensors in states:
            slots = self.slots(torch.arange(tensors[0].shape[2], device=tensors[0].device)[None])
            for store, x in zip(self.stores(layer), tensors, strict=False):
                write_slots(store, slots, x[0].transpose(0, 1) if x.dim() == 4 else x[0][:, None])

    def read_drafter_layer(self, positions: Tensor, heads: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Return a drafter's keys and values of the tokens at positions `[B, S]`, `[B, S, H, d]` each."""
        slots = self.slots(positions)
        keys, values = (x[:, heads].index_select(0, slots).unflatten(0, positions.shape) for x in self.stores(-1)[:2])
        return keys, values

    def commit(self, length: Tensor, nodes: Tensor) -> None:
        """Move the keys and values of accepted nodes next to the committed tokens'.

        Node `nodes[b, d]` moves to slot `length[b] + d`. A source is never before its destination, and all are read
        before any is written. Entries past a path's end are copied too, into scratch slots that are never read.

        Args:
            length: Committed tokens of each row, `[B]` int64.
            nodes: Accepted nodes by depth, `[B, K+1]` int64.
        """
        if nodes.shape[1] == 1:
            return  # the root is in its final slot already
        source = self.slots(length[:, None] + nodes)
        target = self.slots(length[:, None] + torch.arange(nodes.shape[1], device=nodes.device))
        for pool in self.movable:
            pool.index_copy_(1, target.to(pool.device), pool.index_select(1, source.to(pool.device)))
