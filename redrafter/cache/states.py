"""Recurrent states of rows, which layers without attention update token by token, in tensors of fixed size.

A state cannot be cut off after a token, as keys and values can. So the state after the committed tokens of each row is
stored separately from the states after the nodes of its tree, one of which a commit selects.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

from redrafter.attention.prompt_attention import Piece
from redrafter.cache.to_device import to_device
from redrafter.tree.accept import Path
from redrafter.tree.token_tree import Tree, nodes_by_level

StateName: TypeAlias = tuple[str, int | None]
"""An attribute of a layer of transformers' cache, and the index in it where it holds several tensors."""

StateKey: TypeAlias = tuple[int, StateName]
"""A layer, and one of its states."""


@dataclass(frozen=True)
class StateShape:
    """Shape of one tensor of a layer's recurrent state.

    Attributes:
        layer: Index of the layer.
        name: Its name in transformers' cache.
        shape: Its shape, without rows.
        dtype: Its dtype.
        device: Device of the layer.
    """

    layer: int
    name: StateName
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def key(self) -> StateKey:
        """The key of the state in a store: its layer and name."""
        return self.layer, self.name


class RowStates:
    """The states of rows after their committed tokens.

    Attributes:
        shapes: Shapes of the states of each row.
        tensors: The states, `[R, ...]` each.
        position: Number of tokens of each row that the states have read, `[R]` int64.
    """

    def __init__(self, shapes: Sequence[StateShape], rows: int):
        """Allocate states of R rows that have read no tokens. rows: R."""
        self.shapes = shapes
        self.tensors = {x.key: torch.zeros(rows, *x.shape, dtype=x.dtype, device=x.device) for x in shapes}
        self.position = torch.zeros(rows, dtype=torch.long, device=shapes[0].device)

    def copy_rows(self, to: Tensor, source: "RowStates", rows: Tensor) -> None:
        """Copy the rows `rows` of a store over the rows `to` of this one, `[R']` int64 each."""
        pairs = [(self.position, source.position), *((x, source.tensors[key]) for key, x in self.tensors.items())]
        for mine, other in pairs:
            mine.index_copy_(0, to.to(mine.device), other.index_select(0, rows.to(other.device)).to(mine.device))

    def copy_row(self, to: int, row: int) -> None:
        """Copy one row to another, in place, since captured steps read states at fixed addresses."""
        for x in (self.position, *self.tensors.values()):
            x[to].copy_(x[row])


@dataclass(frozen=True)
class TreeLevels:
    """The new nodes of trees by level, W per row at each of L levels, and the entries of their states.

    Attributes:
        nodes: Index of each node among a row's M new ones, `[L, B, W]` int64; M where there is no node.
        parents: Index of each parent among the B * W nodes of the level before, `[L, B * W]` int64; undefined at the
            first level.
        entries: Entry of the state after each node, among the entries of all rows, `[L * B * W]` int64.
        roots: Entry of the state after the parent of each node of the first level, `[B * W]` int64.
    """

    nodes: Tensor
    parents: Tensor
    entries: Tensor
    roots: Tensor


Snapshots: TypeAlias = Mapping[int, Mapping[int, int]]
"""Maps a row of a cache, and then a number of tokens of its prompt, to a row of the store.

The row of the store receives a copy of the states after these tokens, while the prompt is read.
"""

NO_SNAPSHOTS: Snapshots = MappingProxyType({})


class StatesOfRows:
    """The states of some rows of a store, and of the nodes of their trees while a step runs.

    The state after slot s of a row, counted over all its tokens, is entry `s - position + 1` of the row; entry 0 is the
    state after the committed tokens. The last entry is a dummy for missing nodes.

    Attributes:
        store: The states after committed tokens.
        rows: The rows of the store, `[B]` int64.
        snapshots: Rows of the store that receive copies of these while prompts are read.
    """

    def __init__(self, store: RowStates, rows: Tensor | None = None, snapshots: Snapshots = NO_SNAPSHOTS):
        """Make a view of rows of the store. rows: `[B]` int64; None for all."""
        self.store, self.snapshots = store, snapshots
        if rows is None:
            self.use_rows(len(store.position))
        else:
            self.rows = rows
        self._entries: dict[StateKey, Tensor] = {}  # `[B, E, ...]` each, while a step runs
        self._count = 0  # E

    def use_rows(self, rows: int) -> None:
        """Let only the first `rows` rows of the store be active from now on."""
        self.rows = torch.arange(rows, device=self.store.position.device)

    def begin(self, tree: Tree, length: Tensor) -> TreeLevels:
        """Allocate entries for the states of a tree's new nodes; return its levels. length: tokens before its root."""
        if tree.new == tree.tokens.shape[1]:
            # A whole tree begins a new step. A draft model that grows a tree level by level still needs the states of
            # the levels above.
            self._entries.clear()
        # A draft model reads the last committed token again, before the root.
        self._count = tree.tokens.shape[1] + 3
        nodes = nodes_by_level(tree)  # [L, B, W]
        new, above = tree.new, tree.tokens.shape[1] - tree.new
        index = above + nodes.clamp(max=new - 1)  # [L, B, W]
        before = (length - self.store.position.to(length.device)[self.rows.to(length.device)])[:, None]  # [B, 1]
        parents = tree.parents.expand(len(nodes), -1, -1).gather(2, index)  # [L, B, W]
        # A tree's root continues the committed state; a growing tree's new level continues its parents' entries.
        roots = torch.where(index[0] == 0, before, 1 + before + parents[0]).clamp(0, self._count - 2)
        entries = torch.where(nodes == new, self._count - 1, (1 + before + index).clamp(0, self._count - 2))
        # Index of each node within its level: grafted nodes, the last of a tree, may be of any level.
        (rows, width), beam = index.shape[1:], torch.arange(index.shape[2], device=index.device)
        within = nodes.new_zeros(rows, new + 1)
        within.scatter_(1, nodes.transpose(0, 1).flatten(1), beam.repeat(rows, len(nodes)))
        first = torch.arange(rows, device=index.device)[:, None] * width
        above_level = (first + within.expand(len(nodes), -1, -1).gather(2, (parents - above).clamp(min=0))).flatten(1)
        return TreeLevels(nodes, above_level, self._of_all_rows(entries).flatten(), self._of_all_rows(roots).flatten())

    def _of_all_rows(self, entries: Tensor) -> Tensor:
        """Return the index of entries `[..., B, W]` of each row among the entries of all rows."""
        rows = torch.arange(entries.shape[-2], device=entries.device)[:, None]
        return rows * self._count + entries

    def read_entries(self, keys: Iterable[StateKey], entries: Tensor) -> list[Tensor]:
        """Return copies of the states at entries `[R]` of all rows' states, `[R, ...]` each."""
        rooms = map(self._room, keys)
        return [room.flatten(0, 1).index_select(0, entries.to(room.device)) for room in rooms]

    def write_entries(self, keys: Iterable[StateKey], entries: Tensor, states: Iterable[Tensor]) -> None:
        """Write states `[R, ...]` to entries `[R]` of all rows' states."""
        for key, state in zip(keys, states, strict=True):
            room = self._room(key)
            room.flatten(0, 1).index_copy_(0, entries.to(room.device), state)

    def _room(self, key: StateKey) -> Tensor:
        """Return the buffer of one state while a step runs, `[B, E, ...]`."""
        room, store = self._entries.get(key), self.store.tensors[key]
        rows = self.rows.to(store.device)
        # A growing tree needs more entries at each level; states of the levels above keep their entries.
        if room is None or room.shape[1] < self._count:
            grown = store.new_zeros(len(rows), self._count, *store.shape[1:])
            if room is None:
                grown[:, 0] = store.index_select(0, rows)
            else:
                grown[:, : room.shape[1]] = room
            self._entries[key] = room = grown
        return room

    def read_row(self, shapes: Iterable[StateShape], row: int) -> list[Tensor]:
        """Return some states of one row after its committed tokens, `[1, ...]` each."""
        stores = [self.store.tensors[shape.key] for shape in shapes]
        return [store.index_select(0, self.rows[row : row + 1].to(store.device)) for store in stores]

    def write_row(self, shapes: Iterable[StateShape], row: int, states: Iterable[Tensor]) -> None:
        """Replace some states of one row after its committed tokens, `[1, ...]` each."""
        for shape, state in zip(shapes, states, strict=True):
            store = self.store.tensors[shape.key]
            store.index_copy_(0, self.rows[row : row + 1].to(store.device), state.to(store.dtype))

    def write_snapshot(self, shapes: Iterable[StateShape], at: int, states: Iterable[Tensor]) -> None:
        """Copy some states of a row while its prompt is read, `[1, ...]` each, to row `at` of the store."""
        for shape, state in zip(shapes, states, strict=True):
            self.store.tensors[shape.key][at] = state[0]

    def take_note(self, pieces: Sequence[Piece]) -> None:
        """Record that rows have read pieces of prompts, after each of their states and snapshots was written."""
        position = self.store.position
        snapshots = [each for piece in pieces for each in self.snapshots_in(piece).items()]
        read = [(piece.row, piece.end) for piece in pieces] + [(at, count) for count, at in snapshots]
        rows, counts = to_device(read, position.device, torch.long).unbind(1)
        index = torch.cat([self.rows.to(position.device)[rows[: len(pieces)]], rows[len(pieces) :]])
        position.index_copy_(0, index, counts)

    def snapshots_in(self, piece: Piece) -> dict[int, int]:
        """Return the snapshots within a piece of a prompt, the first one first."""
        snapshots = self.snapshots.get(piece.row, {})
        return {count: snapshots[count] for count in sorted(snapshots) if piece.first < count <= piece.end}

    def forget(self, rows: Sequence[int]) -> None:
        """Reset some of the rows to having read no tokens."""
        for store in (self.store.position, *self.store.tensors.values()) if rows else ():
            store.index_fill_(0, self.rows.to(store.device)[to_device(rows, store.device)], 0)

    def commit(self, length: Tensor, path: Path, active: Tensor) -> None:
        """Keep the states after the last accepted node of each active row, and drop the states after other nodes.

        `length` `[B]` int64 tokens are before each row's root; inactive rows keep their states.
        """
        position, home = self.store.position, self.rows.to(self.store.position.device)
        before = position[home]
        length, end, accepted, active = (x.to(position.device) for x in (length, path.end, path.accepted, active))
        # Inactive rows are written too, with their current state, so that shapes do not depend on data.
        entry = torch.where(active, (1 + length - before + end).clamp(0, self._count - 2), 0)  # [B]
        for key, store in self.store.tensors.items():
            kept = self.read_entries([key], self._of_all_rows(entry[:, None]).flatten())[0]
            store.index_copy_(0, self.rows.to(store.device), kept)
        position.index_copy_(0, home, torch.where(active, length + accepted + 1, before))
        # Their memory is as large as all nodes' states, and the next step begins with other nodes.
        self._entries.clear()
