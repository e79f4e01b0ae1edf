"""A key/value cache whose rows have their own lengths and whose newest slots hold a tree.

It is a Hugging Face `Cache`, so any stock model writes to it and reads from it. All layers of one shape live in one
pool, so that committing a path is one gather and one scatter for the whole model.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from redrafter.attention.prefill import Piece

__all__ = ["DenseCache", "LayerShape", "group_by_shape"]

WINDOW_STEP_SLOTS = 64  # slots; the window grows in these steps, so that shapes seldom change


@dataclass(frozen=True)
class LayerShape:
    """What one layer stores per slot: heads and width of its keys and of its values, their dtype and device.

    A layer of 0 heads stores nothing: it attends to what the layer `source` stores, or to nothing of the text.
    """

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    source: int | None = None

    def storing_nothing(self, source: int | None = None) -> "LayerShape":
        """Return the shape of a layer beside this one that stores nothing of its own."""
        return LayerShape(0, 0, 0, self.dtype, self.device, source)


Group = tuple[int, int, torch.dtype, torch.device]  # heads, dim, dtype, device: what a pool's layers have in common


def group_by_shape(shapes: Sequence[LayerShape]) -> dict[Group, list[tuple[int, str]]]:
    """Which layers' "keys" and "values" may share a pool."""
    groups: dict[Group, list[tuple[int, str]]] = {}
    for layer, shape in enumerate(shapes):
        if not shape.heads:
            continue
        for side, dim in (("keys", shape.key_dim), ("values", shape.value_dim)):
            groups.setdefault((shape.heads, dim, shape.dtype, shape.device), []).append((layer, side))
    return groups


class _Pool:
    """Tensors of one shape `[G, B * S, heads, dim]`: keys or values of G layers. Slot s of row b is at `b * S + s`."""

    def __init__(self, count: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device):
        self.data = torch.empty(count, 0, heads, dim, dtype=dtype, device=device)

    def grow(self, rows: int, old: int, new: int) -> None:
        grown = self.data.new_zeros(self.data.shape[0], rows, new, *self.data.shape[2:])
        if old:
            grown[:, :, :old] = rearrange(self.data, "g (b s) h d -> g b s h d", b=rows)
        self.data = rearrange(grown, "g b s h d -> g (b s) h d")
        self.slots = self.data.unbind(0)  # G of `[B * S, heads, dim]`, to write to

    def set_window(self, rows: int, window: int) -> None:
        """Let attention read the first `window` slots of each row."""
        self.visible = rearrange(self.data, "g (b s) h d -> g b h s d", b=rows).narrow(3, 0, window).unbind(0)


class _Layer(CacheLayerMixin):
    """One layer's window onto its pools. `update` is what the model's attention calls."""

    is_sliding = False  # full length is kept on sliding layers too: there is no ring buffer to roll back
    is_initialized = True

    def __init__(self, cache: "DenseCache", keys: tuple[_Pool, int], values: tuple[_Pool, int]):
        self._cache, self.stores = cache, (keys, values)

    @property
    def keys(self) -> Tensor:  # type: ignore[override]
        """`[B, heads, S, dim]`, what attention reads."""
        pool, index = self.stores[0]
        return pool.visible[index]

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        """`[B, heads, S, dim]`, what attention reads."""
        pool, index = self.stores[1]
        return pool.visible[index]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values `[B, heads, N, dim]`, one per node, or `[1, heads, T, dim]` of prompts.

        Returns:
            What attention reads, `[B, heads, S, dim]` each.
        """
        slots = self._cache.slots(key_states.device)
        for states, (pool, index) in zip((key_states, value_states), self.stores, strict=True):
            pool.slots[index].index_copy_(0, slots, states.transpose(1, 2).flatten(0, 1))
        if self._cache.contiguous:
            return self.keys.contiguous(), self.values.contiguous()
        return self.keys, self.values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: shapes are known before the first forward."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.window, 0

    def get_seq_length(self) -> int:
        return self._cache.committed

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.17


class _EmptyLayer(_Layer):
    """A layer that stores nothing, and so looks as it does before any forward."""

    is_initialized = False
    keys = values = None  # type: ignore[assignment]

    def __init__(self, cache: "DenseCache"):
        self._cache = cache

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        raise RuntimeError("a layer that stored nothing in a plain forward was given keys and values to store")

    def get_seq_length(self) -> int:
        return 0


class DenseCache(Cache):
    """Keys and values of `rows` rows. Row b's committed tokens are in slots 0..n_b-1; a tree's node i goes to n_b + i.

    window: slots that attention reads, a host number at least as large as every row's length plus the tree.
    committed: what the model is told of the length, for masks of its own making. 0, because rows differ and positions
    and masks are passed to it; but after `reserve_one_token` the number of committed tokens.
    contiguous: give attention copies whose heads stand one behind the other, as transformers' own cache does. Slower;
    some models read keys by `view` and so cannot do with less.
    """

    def __init__(self, shapes: Sequence[LayerShape], rows: int, contiguous: bool = False):
        self.contiguous = contiguous
        self.pools = []
        stores: dict[tuple[int, str], tuple[_Pool, int]] = {}
        for key, members in group_by_shape(shapes).items():
            self.pools.append(_Pool(len(members), *key))
            stores |= {member: (self.pools[-1], index) for index, member in enumerate(members)}
        super().__init__(
            layers=[
                _Layer(self, stores[i, "keys"], stores[i, "values"]) if shape.heads else _EmptyLayer(self)
                for i, shape in enumerate(shapes)
            ]
        )
        self.rows, self.window, self.committed, self._capacity = rows, 0, 0, 0
        self._shapes = shapes

    def reserve(self, slots: int) -> None:
        """Make room for `slots` slots a row, and let attention read that many, rounded up so that shapes seldom change.

        Room doubles when it must grow.
        """
        self.committed = 0
        self._set_window(-(-slots // WINDOW_STEP_SLOTS) * WINDOW_STEP_SLOTS)

    def reserve_one_token(self, committed: int) -> None:
        """Make room for one token of the only row behind `committed` ones. Then all that attention reads is to be seen,
        so the next forward is ordinary decoding and needs no mask."""
        assert self.rows == 1, "rows of one length only"
        self.committed = committed
        self._set_window(committed + 1)

    def _set_window(self, window: int) -> None:
        if window > self._capacity:
            capacity = -(-max(window, 2 * self._capacity) // WINDOW_STEP_SLOTS) * WINDOW_STEP_SLOTS
            for pool in self.pools:
                pool.grow(self.rows, self._capacity, capacity)
            self._capacity, self.window = capacity, 0
        if window != self.window:
            self.window = window
            for pool in self.pools:
                pool.set_window(self.rows, window)

    @contextmanager
    def subset(self, rows: Tensor, slots: int) -> Iterator["DenseCache"]:
        """Give a cache of these rows alone, `[B']` int64, whose first `slots` slots a row are theirs afterwards."""
        part = DenseCache(self._shapes, len(rows), self.contiguous)
        part.reserve(slots)
        yield part
        for mine, its in zip(self.pools, part.pools, strict=True):
            to = rearrange(mine.data, "g (b s) h d -> g b s h d", b=self.rows)
            of = rearrange(its.data, "g (b s) h d -> g b s h d", b=part.rows)
            to[:, rows.to(to.device), :slots] = of[:, :, :slots]

    def write_after(self, length: Tensor, nodes: int) -> None:
        """Send the next forward's `nodes` nodes to the slots after each row's `length` `[B]`."""
        self._slots = {length.device: self._flat(length, torch.arange(nodes, device=length.device)).flatten()}

    def plan_prefill(self, forward: Sequence[Piece]) -> None:
        """Send the next forward's tokens, of pieces of prompts one behind the other, to the slots of their rows."""
        slots = [piece.row * self._capacity + torch.arange(piece.first, piece.end) for piece in forward]
        self._slots = {torch.device("cpu"): torch.cat(slots)}

    def slots(self, device: torch.device) -> Tensor:
        """`[B * N]` or `[T]` int64, where what this forward reads goes, on a layer's own device."""
        if device not in self._slots:
            self._slots[device] = next(iter(self._slots.values())).to(device)
        return self._slots[device]

    def commit(self, length: Tensor, nodes: Tensor) -> None:
        """Move the path's keys and values next to the committed ones: node `nodes[b, d]` to slot `length[b] + d`.

        length: `[B]`. nodes: `[B, K+1]`, in order of depth. A source is never before its destination, and all are read
        before any is written. What stands past a path's end is copied too, into scratch slots that nothing reads.
        """
        if nodes.shape[1] == 1:
            return  # node 0 already stands where it belongs
        source = self._flat(length, nodes).flatten()
        target = self._flat(length, torch.arange(nodes.shape[1], device=nodes.device)).flatten()
        for pool in self.pools:
            device = pool.data.device
            moved = pool.data.index_select(1, source.to(device))
            pool.data.index_copy_(1, target.to(device), moved)

    def _flat(self, length: Tensor, offset: Tensor) -> Tensor:
        """`[B]` lengths and `[B, M]` or `[M]` offsets to `[B, M]` flat slots."""
        row = torch.arange(self.rows, device=length.device) * self._capacity
        return (row + length)[:, None] + offset
