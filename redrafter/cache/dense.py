"""A KV cache with one buffer per row, which every model of transformers uses as a Hugging Face `Cache`."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from redrafter.attention.mask import AttentionKind
from redrafter.attention.prompt_attention import Piece, PromptPlan
from redrafter.cache.kv_cache import KVCache, LayerShape, allocate, states_of, zeros
from redrafter.cache.states import RowStates, StatesOfRows
from redrafter.kernels.block_size import BLOCK_SIZE

# Names of the cache argument of models: the first since transformers 5.24, which warns of the others; before that the
# second, or the third for models without attention.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
CACHE_NAME = "past_key_values"  # where a forward's signature names no cache
MOST_LATER = 64  # forwards whose entries of a drafter are computed at once
WINDOW_STEP_SLOTS = 4 * BLOCK_SIZE  # the window grows in steps of this size, so that shapes seldom change


class _Layer(CacheLayerMixin):
    """One layer's view of the cache; the model's attention calls `update`.

    Attributes:
        stores: The layer's keys, values and keys of an indexer, by slot of the pools.
        places: The pool of each of them, and its index there.
    """

    is_sliding = False  # sliding layers keep all tokens too, as a ring buffer could not be rolled back
    is_initialized = True

    stores: tuple[Tensor, ...]

    def __init__(self, cache: "DenseCache"):
        self._cache = cache
        self.places: Sequence[tuple[int, int]] = ()

    @property
    def keys(self) -> Tensor:  # type: ignore[override]
        """The keys that attention reads, `[B, heads, S, dim]`."""
        return self._cache.seen(self.places[0])

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        """The values that attention reads, `[B, heads, S, dim]`."""
        return self._cache.seen(self.places[1])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new keys and values, and return those that attention reads.

        New keys and values are `[B, heads, N, dim]` for trees, or `[1, heads, T, dim]` for pieces of prompts; the
        results are `[B, heads, S, dim]`.
        """
        slots = self._cache.written[key_states.device]
        for store, states in zip(self.stores, self._cache.finite_nodes(key_states, value_states), strict=False):
            store.index_copy_(0, slots, states.transpose(1, 2).flatten(0, 1))
        if self._cache.contiguous:
            return self.keys.contiguous(), self.values.contiguous()
        return self.keys, self.values

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Store the new keys `[B, N, dim]` of an indexer, and return those in the window, `[B, S, dim]`."""
        slots = self._cache.written[indexer_key_states.device]
        [states] = self._cache.finite_nodes(indexer_key_states[:, None])
        self.stores[2].index_copy_(0, slots, states.transpose(1, 2).flatten(0, 1))
        return self._cache.seen(self.places[2])[:, 0]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing, since shapes are known before the first forward."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of slots that attention reads, and the first of them."""
        return self._cache.window, 0

    def get_seq_length(self) -> int:
        """Return the length that this cache reports to the model (`DenseCache.committed`)."""
        return self._cache.committed

    def get_max_length(self) -> int:
        """Return -1: the cache grows without bound."""
        return -1


class _EmptyLayer(_Layer):
    """A layer without keys, which transformers takes for one before any forward, or for one with states."""

    keys = values = None  # type: ignore[assignment]

    def __init__(self, cache: "DenseCache", keeps_states: bool):
        super().__init__(cache)
        self.is_initialized = keeps_states

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Raise `RuntimeError`: such a layer must not receive keys and values."""
        raise RuntimeError("a layer that stored nothing in a causal forward has received keys and values to store")

    def get_seq_length(self) -> int:
        """Return the length reported to the model for a layer with states; 0 where nothing is stored."""
        return self._cache.committed if self.is_initialized else 0


class DenseCache(KVCache, Cache):
    """Keys and values of rows that have a buffer each; slot s of row b is slot `b * capacity + s` of the pools.

    Attributes:
        rows: B, rows that are active in forwards: all, or the first ones (`use_rows`).
        capacity: Slots of each row.
        committed: Length reported to the model, which it uses for masks. 0, because rows differ in length and the model
            receives positions and masks; after `reserve_one_token`, the number of committed tokens.
        contiguous: Whether attention receives contiguous copies, as from transformers' own cache.
        layers: A view of each layer; transformers' name for the objects that a model's layers write to.
        written: The slots that the next forward stores its tokens in, `[B * N]` or `[T]` int64, on each device.
        sums: Sums of the keys and values of each node of the trees of the last forward, `[B, N]` float32, which are not
            finite where any number of the node is not; None for a forward without drafts.
    """

    def __init__(self, shapes: Sequence[LayerShape], rows: int, contiguous: bool = False):
        """Make a cache without slots; `reserve` allocates some.

        Args:
            shapes: Shape of each layer.
            rows: B, rows of the batch.
            contiguous: Give attention contiguous copies of keys and values. Slower, but some models read keys through
                `view`, which needs them.
        """
        self._views = [_Layer(self) if shape.heads else _EmptyLayer(self, bool(shape.states)) for shape in shapes]
        super().__init__(layers=[*self._views])
        kept = states_of(shapes)
        self.states = StatesOfRows(RowStates(kept, rows)) if kept else None
        self.contiguous, self.for_model = contiguous, self
        self.rows, self.window, self.committed, self.capacity = rows, 0, 0, 0
        self.sums: Tensor | None = None
        self.has_drafter_layer = shapes[-1].of_drafter
        self._later: list[tuple[Tensor, ...]] = []
        self._write: Callable[..., None] | None = None
        self._shapes, self._all_rows = shapes, rows
        self._devices = {shape.device for shape in shapes}
        self.pools, places = allocate(shapes, 0)
        self.movable = self.pools
        self._visible: list[tuple[Tensor, ...]] | None = None  # what attention reads of each pool, by layer
        for layer, home in zip(self._views, places, strict=True):
            layer.places = home

    def use_rows(self, rows: int) -> None:
        """Let only the first `rows` rows take part in forwards, until the next call. Other rows keep their contents."""
        assert rows <= self._all_rows, "more rows than there are"
        # Setting the window to 0 forces the views to be made again for the new number of rows.
        self.rows, window, self.window = rows, self.window, 0
        self._set_window(window)
        if self.states is not None:
            self.states.use_rows(rows)

    def write_rows(self, to: Sequence[int], part: "DenseCache", rows: Sequence[int]) -> None:
        """Copy rows of this or another cache of the same model, with their states, over the rows `to`.

        The other cache must not have more slots in use than this one provides.
        """
        self.write_now()
        part.write_now()
        # Pools may have different capacity: each cache grows on its own.
        slots, to, rows = min(part.capacity, self.capacity), list(to), list(rows)
        for pool, part_pool in zip(self.pools, part.pools, strict=True):
            written = self.by_row(pool)
            written[:, to, :slots] = part.by_row(part_pool)[:, rows, :slots]
            written[:, to, slots:] = 0  # an earlier row's NaN would not be masked there, as 0 * NaN is NaN
        if self.states is not None:
            assert part.states is not None, "both caches are of one model"
            self.states.store.copy_rows(torch.tensor(to), part.states.store, torch.tensor(rows))

    def by_row(self, pool: Tensor) -> Tensor:
        """Return a view of a pool as `[G, B, S, heads, dim]`, of all rows."""
        return pool.unflatten(1, (self._all_rows, self.capacity))

    def reserve(self, slots: int) -> None:
        """Provide `slots` slots per row and let attention read that many.

        The number is rounded up so that shapes seldom change. Capacity at least doubles when it grows.
        """
        self.committed = 0
        self._set_window(-(-slots // WINDOW_STEP_SLOTS) * WINDOW_STEP_SLOTS)

    def reserve_one_token(self, committed: int) -> None:
        """Provide a slot for one more token of the only row, after its `committed` tokens.

        Attention then reads exactly the slots that the token may see, so the next forward is ordinary decoding and
        needs no mask.
        """
        assert self.rows == 1, "rows differ in length"
        self.committed = committed
        self._set_window(committed + 1)

    def _set_window(self, window: int) -> None:
        """Let attention read the first `window` slots of each row, growing the pools where they have fewer."""
        if window > self.capacity:
            capacity = -(-max(window, 2 * self.capacity) // WINDOW_STEP_SLOTS) * WINDOW_STEP_SLOTS
            self.write_now()
            # Pools are replaced one by one, so that only one is held twice at a time.
            for number, pool in enumerate(self.pools):
                slots = self._all_rows * capacity
                grown = zeros(len(pool), slots, *pool.shape[2:], dtype=pool.dtype, device=pool.device)
                grown.unflatten(1, (self._all_rows, capacity))[:, :, : self.capacity] = self.by_row(pool)
                self.pools[number] = grown
            self.capacity, self.window = capacity, 0
            # Views per layer are made once here, since `update` runs for every layer of every forward.
            unbound = [pool.unbind(0) for pool in self.pools]
            for layer in self._views:
                layer.stores = tuple(unbound[number][index] for number, index in layer.places)
        if window != self.window:
            self.window, self._visible = window, None

    def seen(self, place: tuple[int, int]) -> Tensor:
        """Return what attention reads of one of a layer's stores, `[B, heads, S, dim]`."""
        if self._visible is None:
            rows, window = self.rows, self.window
            self._visible = [self.by_row(pool)[:, :rows, :window].transpose(2, 3).unbind(0) for pool in self.pools]
        return self._visible[place[0]][place[1]]

    @property
    def table(self) -> Tensor:  # type: ignore[override]
        """The blocks of each row: its slots are successive, and a multiple of a block's."""
        blocks = self.capacity // BLOCK_SIZE
        first = torch.arange(self.rows, dtype=torch.int32, device=self._shapes[-1].device)[:, None] * blocks
        return first + torch.arange(blocks, dtype=torch.int32, device=first.device)

    def stores(self, layer: int) -> tuple[Tensor, ...]:
        """Return the stores of a layer; see `KVCache.stores`."""
        if layer == -1:
            self.write_now()
        return self._views[layer].stores

    def commit(self, length: Tensor, nodes: Tensor) -> None:
        """Move the keys and values of accepted nodes; see `KVCache.commit`."""
        self.write_now()
        super().commit(length, nodes)

    def write_later(self, write: Callable[..., None], *tokens: Tensor) -> None:
        """Call `write(cache, *tokens)` before entries are read or moved, once for the tokens of several such calls."""
        self._write = write
        self._later.append(tokens)
        if len(self._later) == MOST_LATER:
            self.write_now()

    def write_now(self) -> None:
        """Write what `write_later` was given."""
        later, self._later = self._later, []
        if later and self._write is not None:
            self._write(self, *map(torch.cat, zip(*later, strict=True)))

    def forget_later(self) -> None:
        """Forget what `write_later` was given, as no row is in use."""
        self._later = []

    def slots(self, row_slots: Tensor) -> Tensor:
        """Map slots counted along each row, `[B, M']`, to slots of the pools, `[B * M']`."""
        first = torch.arange(self.rows, device=row_slots.device)[:, None] * self.capacity
        return (first + row_slots).flatten()

    @contextmanager
    def subset(self, rows: Tensor, slots: int) -> Iterator["DenseCache"]:
        """Yield an empty cache for rows `[B']` int64, whose first `slots` slots are copied to them at the end."""
        part = DenseCache(self._shapes, len(rows), self.contiguous)
        part.reserve(slots)
        yield part
        self.write_rows(rows.tolist(), part, range(len(rows)))

    def write_after(self, length: Tensor, nodes: int, *, drafts: bool = False) -> None:
        """Let the next forward store its `nodes` nodes after each row's committed tokens, `length` `[B]`.

        With `drafts`, they are nodes of trees, some of which may be rejected, as `finite_nodes` requires.
        """
        self.sums = torch.zeros(len(length), nodes, dtype=torch.float32, device=length.device) if drafts else None
        slots = self.slots(length[:, None] + torch.arange(nodes, device=length.device))
        # Layers may be on several devices; each needs an index tensor on its device.
        self.written = {device: slots.to(device) for device in self._devices}

    def finite_nodes(self, *states: Tensor) -> Sequence[Tensor]:
        """Return keys and values `[B, heads, N, dim]` of drafts, with zeros in place of numbers that are not finite.

        A mask does not hide a NaN from nodes that do not attend to it, in this forward or in a later one over the same
        slots, as 0 * NaN is NaN. `sums` identifies the nodes with such numbers, whose logits are not finite either.
        """
        if self.sums is None:
            return states
        for x in states:  # a sum is not finite where any of its terms is not, and stays so
            self.sums += x.sum((1, 3), dtype=torch.float32).to(self.sums.device)
        return [x.nan_to_num(0, 0, 0) for x in states]

    def plan_prefill(self, pieces: Sequence[Piece], kinds: Sequence[AttentionKind]) -> PromptPlan:
        """Let the next forward store its tokens, the pieces one after another, in the slots of their rows."""
        self.sums = None
        slots = torch.cat([piece.row * self.capacity + torch.arange(piece.first, piece.end) for piece in pieces])
        self.written = {device: slots.to(device) for device in self._devices}
        return PromptPlan(pieces, kinds, slots)


def cache_argument(forward: Callable[..., object]) -> str | None:
    """Return the name of the argument by which a forward is given a cache, or None where it takes none."""
    names = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in names), None)


def cache_in(found: object) -> Cache | None:
    """Return the cache in a model's output, or among the inputs that were prepared for it; None without one."""
    get = found.get if isinstance(found, Mapping) else partial(getattr, found)
    return next((cache for name in CACHE_NAMES if (cache := get(name, None)) is not None), None)
