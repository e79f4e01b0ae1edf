"""Recurrent states of rows: what layers without attention keep of a text, in tensors of one size for any length.

A state cannot be cut off behind a token, as keys and values can. So the state after the committed tokens of each row is
kept apart from those after the nodes of its tree, of which a commit picks one.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from redrafter.tree.accept import Path
from redrafter.tree.levels import nodes_by_level
from redrafter.tree.token_tree import Tree

__all__ = ["RowStates", "StateKey", "StateName", "StateShape", "StatesOfRows", "TreeLevels"]

StateName: TypeAlias = tuple[str, int | None]
"""An attribute of a layer of transformers' cache, and the index in it where it holds several tensors."""

StateKey: TypeAlias = tuple[int, StateName]
"""A layer, and one of its states."""


@dataclass(frozen=True)
class StateShape:
    """One tensor that a layer keeps of a text.

    Attributes:
        layer: Index of the layer.
        name: What transformers' cache calls it.
        shape: Its shape, without rows.
        dtype: Its dtype.
        device: Where the layer runs.
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
        """The layer and the name by which a store finds the state."""
        return self.layer, self.name


class RowStates:
    """The states of rows after their committed tokens.

    Attributes:
        shapes: What is kept of each row.
        tensors: The states, `[R, ...]` each.
        position: How many tokens of each row they have read, `[R]` int64.
    """

    def __init__(self, shapes: Sequence[StateShape], rows: int):
        """Begin with rows that have read nothing. rows: R."""
        self.shapes = shapes
        self.tensors = {
            shape.key: torch.zeros(rows, *shape.shape, dtype=shape.dtype, device=shape.device) for shape in shapes
        }
        self.position = torch.zeros(rows, dtype=torch.long, device=shapes[0].device)

    def copy_rows(self, to: Tensor, source: "RowStates", rows: Tensor) -> None:
        """Copy the rows `rows` of a store over the rows `to` of this one, `[R']` int64 each."""
        pairs = [(self.position, source.position), *((x, source.tensors[key]) for key, x in self.tensors.items())]
        for mine, other in pairs:
            mine.index_copy_(0, to.to(mine.device), other.index_select(0, rows.to(other.device)).to(mine.device))


@dataclass(frozen=True)
class TreeLevels:
    """The new nodes of trees by level, and where their states are.

    Attributes:
        nodes: Of each level, the index of its nodes among a row's M new ones, `[B, W]` int64 each; M where there is
            none.
        entries: Of each level, where the states after its nodes are kept, `[B, W]` int64 each.
        parents: Of each level, where the states after their parents are kept, `[B, W]` int64 each.
    """

    nodes: Sequence[Tensor]
    entries: Sequence[Tensor]
    parents: Sequence[Tensor]


class StatesOfRows:
    """The states of some rows of a store, and those after the nodes of their trees while a step runs.

    The state after slot s of a row, which counts all its tokens, is entry `s - position + 1`; entry 0 is that after
    the committed tokens. The last entry is for nodes that are none.

    Attributes:
        store: The states after committed tokens.
        rows: The rows of the store, `[B]` int64.
    """

    def __init__(self, store: RowStates, rows: Tensor | None = None):
        """Begin with nothing but what the store has. rows: `[B]` int64; None for all."""
        self.store = store
        if rows is None:
            self.use_rows(len(store.position))
        else:
            self.rows = rows
        self._entries: dict[StateKey, Tensor] = {}  # `[B, E, ...]` each, while a step runs
        self._count = 0  # E

    def use_rows(self, rows: int) -> None:
        """Let only the first `rows` rows of the store take part from now on."""
        self.rows = torch.arange(rows, device=self.store.position.device)

    def begin(self, tree: Tree, length: Tensor) -> TreeLevels:
        """Make room for the states after the new nodes of a tree, and return its levels.

        Args:
            tree: The trees of the rows.
            length: Tokens of each row before its root, `[B]` int64.
        """
        if tree.new == tree.tokens.shape[1]:
            self._entries.clear()
        # A draft model reads the last committed token again, before the root.
        self._count = tree.tokens.shape[1] + 3
        nodes = nodes_by_level(tree)  # [L, B, W]
        new, above = tree.new, tree.tokens.shape[1] - tree.new
        index = (above + nodes.clamp(max=new - 1)).transpose(0, 1).flatten(1)  # [B, L * W]
        before = (length - self.store.position.to(length.device)[self.rows.to(length.device)])[:, None]  # [B, 1]
        parents = tree.parents.gather(1, index)
        parents = torch.where(index == 0, before, 1 + before + parents).clamp(0, self._count - 2)
        entries = torch.where(
            (nodes == new).transpose(0, 1).flatten(1), self._count - 1, (1 + before + index).clamp(0, self._count - 2)
        )
        by_level = [x.view(len(length), *nodes.shape[::2]).unbind(1) for x in (entries, parents)]
        return TreeLevels(nodes.unbind(0), *by_level)

    def read_entries(self, keys: Iterable[StateKey], entries: Tensor) -> list[Tensor]:
        """Return states kept at entries `[B, W]` of the rows, `[B * W, ...]` each."""
        return [self._room(key)[self._index(entries, key)] for key in keys]

    def write_entries(self, keys: Iterable[StateKey], entries: Tensor, states: Iterable[Tensor]) -> None:
        """Keep states `[B * W, ...]` at entries `[B, W]` of the rows."""
        for key, state in zip(keys, states, strict=True):
            room = self._room(key)
            room[self._index(entries, key)] = state.to(room.dtype)

    def _index(self, entries: Tensor, key: StateKey) -> tuple[Tensor, Tensor]:
        """Return the index of entries `[B, W]` in the room of a state."""
        entries = entries.to(self.store.tensors[key].device)
        row = torch.arange(entries.shape[0], device=entries.device)[:, None].expand_as(entries)
        return row.flatten(), entries.flatten()

    def _room(self, key: StateKey) -> Tensor:
        """Return where one state is kept while a step runs, `[B, E, ...]`."""
        room, store = self._entries.get(key), self.store.tensors[key]
        rows = self.rows.to(store.device)
        if room is None:
            room = store.new_zeros(len(rows), 1, *store.shape[1:])
            room[:, 0] = store.index_select(0, rows)
        if room.shape[1] < self._count:
            missing = room.new_zeros(len(rows), self._count - room.shape[1], *room.shape[2:])
            room = torch.cat([room, missing], dim=1)
        self._entries[key] = room
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

    def take_note(self, rows: Sequence[int], upto: Sequence[int]) -> None:
        """Take note that rows have read their first `upto` tokens, after `write_row` for each of their states."""
        position = self.store.position
        index = self.rows.to(position.device)[torch.tensor(rows, device=position.device)]
        position[index] = torch.tensor(upto, device=position.device)

    def forget(self, rows: Tensor) -> None:
        """Let the rows marked in `rows` `[B]` bool have read nothing."""
        for store in (self.store.position, *self.store.tensors.values()):
            index = self.rows.to(store.device)[rows.to(store.device)]
            store[index] = 0

    def commit(self, length: Tensor, path: Path, active: Tensor) -> None:
        """Keep the states after the last accepted node of each active row, and let go of those after other nodes.

        Args:
            length: Tokens of each row before its root, `[B]` int64.
            path: The accepted nodes.
            active: Rows that advance, `[B]` bool; the others keep what they have.
        """
        position, home = self.store.position, self.rows.to(self.store.position.device)
        before = position[home]
        length, end, accepted, active = (x.to(position.device) for x in (length, path.end, path.accepted, active))
        entry = torch.where(active, (1 + length - before + end).clamp(0, self._count - 2), 0)  # [B]
        for key, store in self.store.tensors.items():
            kept = self.read_entries([key], entry[:, None])[0]
            store.index_copy_(0, self.rows.to(store.device), kept)
        position.index_copy_(0, home, torch.where(active, length + accepted + 1, before))
        self._entries.clear()
