"""A KV cache with one buffer per row, whose rows have their own lengths and end in the slots of a tree.

It is a Hugging Face `Cache`, so any stock model writes to it and reads from it. All layers of one shape share a pool,
so that committing a path is one gather and one scatter for the whole model.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from redrafter.attention.prompt_attention import Piece
from redrafter.cache.states import RowStates, StateShape, StatesOfRows
from redrafter.tree.accept import Path

WINDOW_STEP_SLOTS = 64  # the window grows in steps of this size, so that shapes seldom change


@dataclass(frozen=True)
class LayerShape:
    """The keys and values that one layer stores per slot, and the recurrent states that it keeps per row.

    Attributes:
        heads: Key heads; 0 for a layer that stores nothing.
        key_dim: Width of a head's key.
        value_dim: Width of a head's value.
        dtype: Dtype of keys and values.
        device: Where the layer runs.
        source: For a layer that stores nothing, the layer whose keys and values it attends to; None where it attends to
            no tokens before it.
        of_drafter: Whether it is what a drafter stores, which stands behind the model's own layers.
        index_dim: Width of the keys by which an indexer chooses the slots that the layer attends to, one a slot; 0
            without an indexer.
        states: Recurrent states; none for a layer that only attends.
    """

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    source: int | None = None
    of_drafter: bool = False
    index_dim: int = 0
    states: tuple[StateShape, ...] = ()

    def widened(self) -> "LayerShape":
        """Return the shape of the layer where it computes in float32."""
        states = tuple(replace(state, dtype=torch.float32) for state in self.states)
        return replace(self, dtype=torch.float32, states=states)

    def storing_nothing(self, source: int | None = None) -> "LayerShape":
        """Return the shape of a layer beside this one that stores nothing of its own."""
        return LayerShape(0, 0, 0, self.dtype, self.device, source)


Group = tuple[int, int, torch.dtype, torch.device]  # heads, width, dtype, device: the same for all layers of a pool


def group_by_shape(shapes: Sequence[LayerShape]) -> dict[Group, list[tuple[int, str]]]:
    """Return which layers' "keys", "values" and "index_keys" can share a pool, by their shape."""
    groups: dict[Group, list[tuple[int, str]]] = {}
    for layer, shape in enumerate(shapes):
        if not shape.heads:
            continue
        for side, dim in (("keys", shape.key_dim), ("values", shape.value_dim)):
            groups.setdefault((shape.heads, dim, shape.dtype, shape.device), []).append((layer, side))
        if shape.index_dim:
            groups.setdefault((1, shape.index_dim, shape.dtype, shape.device), []).append((layer, "index_keys"))
    return groups


def states_of(shapes: Sequence[LayerShape]) -> list[StateShape]:
    """Return the recurrent states of all layers."""
    return [state for shape in shapes for state in shape.states]


def stored_as(shapes: Sequence[LayerShape], dtype: torch.dtype | None) -> list[LayerShape]:
    """Return shapes of layers stored in another format, None for their own; what a drafter stores keeps its."""
    return [shape if dtype is None or shape.of_drafter else replace(shape, dtype=dtype) for shape in shapes]


class _Pool:
    """Keys or values of G layers in one tensor `[G, B * S, heads, dim]`; slot s of row b is at index `b * S + s`."""

    def __init__(self, count: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device):
        self.data = torch.empty(count, 0, heads, dim, dtype=dtype, device=device)

    def grow(self, rows: int, old: int, new: int) -> None:
        """Enlarge each row from `old` to `new` slots and keep what is stored."""
        grown = self.data.new_zeros(self.data.shape[0], rows, new, *self.data.shape[2:])
        if old:
            grown[:, :, :old] = rearrange(self.data, "g (b s) h d -> g b s h d", b=rows)
        self.data = rearrange(grown, "g b s h d -> g (b s) h d")
        self.slots = self.data.unbind(0)  # G tensors `[B * S, heads, dim]`, to write to

    def set_window(self, all_rows: int, rows: int, window: int) -> None:
        """Let attention read the first `window` slots of each of the first `rows` rows."""
        whole = rearrange(self.data, "g (b s) h d -> g b h s d", b=all_rows)
        self.visible = whole[:, :rows, :, :window].unbind(0)


class _Layer(CacheLayerMixin):
    """One layer's view of its pools; the model's attention calls `update`."""

    is_sliding = False  # sliding layers keep all tokens too, so that there is no ring buffer to roll back
    is_initialized = True

    def __init__(self, cache: "DenseCache", keys: tuple[_Pool, int], values: tuple[_Pool, int]):
        self._cache, self.stores = cache, (keys, values)

    @property
    def keys(self) -> Tensor:  # type: ignore[override]
        """Keys that attention reads, `[B, heads, S, dim]`."""
        pool, index = self.stores[0]
        return pool.visible[index]

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        """Values that attention reads, `[B, heads, S, dim]`."""
        pool, index = self.stores[1]
        return pool.visible[index]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store the new keys and values, and return those that attention reads.

        They are `[B, heads, N, dim]` of trees, or `[1, heads, T, dim]` of pieces of prompts; what is returned, `[B,
        heads, S, dim]`.
        """
        slots = self._cache.slots(key_states.device)
        for states, (pool, index) in zip((key_states, value_states), self.stores, strict=True):
            pool.slots[index].index_copy_(0, slots, states.transpose(1, 2).flatten(0, 1))
        if self._cache.contiguous:
            return self.keys.contiguous(), self.values.contiguous()
        return self.keys, self.values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing, since shapes are known before the first forward."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of slots that attention reads, and the first of them."""
        return self._cache.window, 0

    def get_seq_length(self) -> int:
        """Return the length that the model is told, see `DenseCache.committed`."""
        return self._cache.committed

    def get_max_length(self) -> int:
        """Return -1: the cache grows without a bound of its own."""
        return -1


class _IndexedLayer(_Layer):
    """A layer that also stores keys for an indexer, which chooses by them the slots that attention reads."""

    def __init__(
        self, cache: "DenseCache", keys: tuple[_Pool, int], values: tuple[_Pool, int], index_keys: tuple[_Pool, int]
    ):
        super().__init__(cache, keys, values)
        self._index_store = index_keys

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Store the new keys `[B, N, dim]` of the indexer, and return those in the window, `[B, S, dim]`."""
        pool, index = self._index_store
        slots = self._cache.slots(indexer_key_states.device)
        pool.slots[index].index_copy_(0, slots, indexer_key_states.flatten(0, 1)[:, None])
        return pool.visible[index][:, 0]


class _EmptyLayer(_Layer):
    """A layer that stores nothing, which transformers sees as a layer before any forward."""

    is_initialized = False
    keys = values = None  # type: ignore[assignment]

    def __init__(self, cache: "DenseCache"):
        self._cache = cache

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Raise `RuntimeError`: such a layer is never given keys and values."""
        raise RuntimeError("a layer that stored nothing in a plain forward was given keys and values to store")

    def get_seq_length(self) -> int:
        """Return 0, since nothing is stored."""
        return 0


class _StatesLayer(_EmptyLayer):
    """A layer that keeps recurrent states alone, which its module is given apart from the cache."""

    is_initialized = True

    def get_seq_length(self) -> int:
        """Return the length that the model is told, as any layer that stores keys does."""
        return self._cache.committed


class DenseCache(Cache):
    """Keys and values of the rows of a batch, one buffer per row.

    Row b's n_b committed tokens are in slots 0 to n_b - 1; node i of a tree goes to slot n_b + i.

    Attributes:
        rows: B, rows that take part in forwards: all, or the first ones (`use_rows`).
        window: Slots per row that attention reads; a number on the host, at least every row's length plus the tree.
        committed: The length that the model is told, for masks of its own making. 0, because lengths differ and
            positions and masks are passed to the model; after `reserve_one_token`, the number of committed tokens.
        contiguous: Whether attention is given contiguous copies, as by transformers' own cache.
        pools: The tensors of all layers, one pool for all keys or values of one shape.
        has_drafter_layer: Whether the last layer is what a drafter stores.
        states: The recurrent states of the rows; None for a model without.
    """

    def __init__(self, shapes: Sequence[LayerShape], rows: int, contiguous: bool = False):
        """Begin without slots; `reserve` makes some.

        Args:
            shapes: What each layer stores.
            rows: B, rows of the batch.
            contiguous: Give attention contiguous copies of keys and values. Slower, but some models read keys through
                `view`, which needs them.
        """
        self.contiguous = contiguous
        self.pools = []
        stores: dict[tuple[int, str], tuple[_Pool, int]] = {}
        for key, members in group_by_shape(shapes).items():
            self.pools.append(_Pool(len(members), *key))
            stores |= {member: (self.pools[-1], index) for index, member in enumerate(members)}
        super().__init__(layers=[self._layer(shape, stores, i) for i, shape in enumerate(shapes)])
        kept = states_of(shapes)
        self.states = StatesOfRows(RowStates(kept, rows)) if kept else None
        self.rows, self.window, self.committed, self._capacity = rows, 0, 0, 0
        self.has_drafter_layer = shapes[-1].of_drafter
        self._shapes, self._all_rows = shapes, rows

    def _layer(self, shape: LayerShape, stores: Mapping[tuple[int, str], tuple[_Pool, int]], index: int) -> _Layer:
        """Return the view of layer `index` of its stores."""
        if not shape.heads:
            return _layer_without_keys(self, shape)
        if not shape.index_dim:
            return _Layer(self, stores[index, "keys"], stores[index, "values"])
        return _IndexedLayer(self, stores[index, "keys"], stores[index, "values"], stores[index, "index_keys"])

    def use_rows(self, rows: int) -> None:
        """Let only the first `rows` rows take part in forwards, until the next call. The others keep what they hold."""
        assert rows <= self._all_rows, "more rows than there are"
        if rows != self.rows:
            self.rows, window, self.window = rows, self.window, 0
            self._set_window(window)
            if self.states is not None:
                self.states.use_rows(rows)

    def move_row(self, source: int, to: int) -> None:
        """Copy the keys and values of one row, and its states, over those of another."""
        for pool in self.pools:
            data = self.by_row(pool)
            data[:, to] = data[:, source]
        self._copy_states(torch.tensor([to]), self, torch.tensor([source]))

    def _copy_states(self, to: Tensor, source: "DenseCache", rows: Tensor) -> None:
        """Copy the states of rows `rows` of a cache of the same model over those of `to`, `[R']` int64 each."""
        if self.states is not None:
            assert source.states is not None, "both caches are of one model"
            self.states.store.copy_rows(to, source.states.store, rows)

    def write_rows(self, first: int, part: "DenseCache", rows: Sequence[int]) -> None:
        """Copy rows of another cache of the same model over those from row `first` on.

        The other cache has no more slots in use than this one provides.
        """
        slots = min(part.window, self.window)
        for pool, part_pool in zip(self.pools, part.pools, strict=True):
            written = self.by_row(pool)[:, first : first + len(rows)]
            written[:, :, :slots] = part.by_row(part_pool)[:, list(rows), :slots]
            written[:, :, slots:] = 0  # a NaN that another text has left there would not be masked: it stays one
        self._copy_states(torch.arange(first, first + len(rows)), part, torch.tensor(rows))

    def by_row(self, pool: _Pool) -> Tensor:
        """Return a view of a pool as `[G, B, S, heads, dim]`, of all rows."""
        return rearrange(pool.data, "g (b s) h d -> g b s h d", b=self._all_rows)

    def reserve(self, slots: int) -> None:
        """Provide `slots` slots per row and let attention read that many.

        The number is rounded up so that shapes seldom change. Memory at least doubles when it must grow.
        """
        self.committed = 0
        self._set_window(-(-slots // WINDOW_STEP_SLOTS) * WINDOW_STEP_SLOTS)

    def reserve_one_token(self, committed: int) -> None:
        """Provide a slot for one more token of the only row, after its `committed` tokens.

        Attention then reads exactly the slots that the token may see, so the next forward is ordinary decoding and
        needs no mask.
        """
        assert self.rows == 1, "rows of one length only"
        self.committed = committed
        self._set_window(committed + 1)

    def _set_window(self, window: int) -> None:
        """Let attention read the first `window` slots of each row, growing the pools where they have fewer."""
        if window > self._capacity:
            capacity = -(-max(window, 2 * self._capacity) // WINDOW_STEP_SLOTS) * WINDOW_STEP_SLOTS
            for pool in self.pools:
                pool.grow(self._all_rows, self._capacity, capacity)
            self._capacity, self.window = capacity, 0
        if window != self.window:
            self.window = window
            for pool in self.pools:
                pool.set_window(self._all_rows, self.rows, window)

    @contextmanager
    def subset(self, rows: Tensor, slots: int) -> Iterator["DenseCache"]:
        """Yield an empty cache for rows `[B']` int64, whose first `slots` slots are copied over theirs at the end."""
        part = DenseCache(self._shapes, len(rows), self.contiguous)
        part.reserve(slots)
        yield part
        for pool, part_pool in zip(self.pools, part.pools, strict=True):
            data = self.by_row(pool)
            data[:, rows.to(data.device), :slots] = part.by_row(part_pool)[:, :, :slots]
        self._copy_states(rows, part, torch.arange(len(rows)))

    def write_after(self, length: Tensor, nodes: int) -> None:
        """Let the next forward store its `nodes` nodes after each row's committed tokens, `length` `[B]`."""
        self._slots = {length.device: self._flat(length, torch.arange(nodes, device=length.device)).flatten()}

    def plan_prefill(self, forward: Sequence[Piece]) -> None:
        """Let the next forward store its tokens, which are those of all pieces in turn, in the slots of their rows."""
        slots = [piece.row * self._capacity + torch.arange(piece.first, piece.end) for piece in forward]
        self._slots = {torch.device("cpu"): torch.cat(slots)}

    def slots(self, device: torch.device) -> Tensor:
        """Return the slots that the next forward stores its tokens in, `[B * N]` or `[T]` int64, on `device`."""
        if device not in self._slots:
            self._slots[device] = next(iter(self._slots.values())).to(device)
        return self._slots[device]

    def read_drafter_layer(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a drafter remembers of the tokens at positions `[B, S]`, keys and values `[B, S, H, d]`."""
        slots = self._flat(torch.zeros_like(positions[:, 0]), positions)  # [B, S]
        keys, values = (store[slots] for store in self.drafter_stores())
        return keys, values

    def drafter_stores(self) -> tuple[Tensor, Tensor]:
        """Return where a drafter's keys and values are, by slot, `[slots, H, d]` each; they are the last layer."""
        layer: Any = self.layers[-1]
        (keys, key_index), (values, value_index) = layer.stores
        return keys.slots[key_index], values.slots[value_index]

    def commit(self, length: Tensor, nodes: Tensor) -> None:
        """Move the keys and values of accepted nodes next to those of the committed tokens.

        Node `nodes[b, d]` goes to slot `length[b] + d`. A source is never before its destination, and all are read
        before any is written. Entries past a path's end are copied too, into scratch slots that nothing reads.

        Args:
            length: Committed tokens of each row, `[B]` int64.
            nodes: Accepted nodes by depth, `[B, K+1]` int64.
        """
        if nodes.shape[1] == 1:
            return  # the root is in its final slot already
        source = self._flat(length, nodes).flatten()
        target = self._flat(length, torch.arange(nodes.shape[1], device=nodes.device)).flatten()
        for pool in self.pools:
            device = pool.data.device
            moved = pool.data.index_select(1, source.to(device))
            pool.data.index_copy_(1, target.to(device), moved)

    def commit_states(self, length: Tensor, path: Path, active: Tensor) -> None:
        """Keep the recurrent states after the accepted nodes of active rows, if the model has any."""
        if self.states is not None:
            self.states.commit(length, path, active)

    def _flat(self, length: Tensor, offset: Tensor) -> Tensor:
        """Return indices into the pools, `[B, M]`, of slots `length` `[B]` plus `offset` `[B, M]` or `[M]`."""
        row = torch.arange(self.rows, device=length.device) * self._capacity
        return (row + length)[:, None] + offset


def _layer_without_keys(cache: DenseCache, shape: LayerShape) -> _EmptyLayer:
    """Return the layer of a cache for one that stores no keys and values."""
    return _StatesLayer(cache) if shape.states else _EmptyLayer(cache)
