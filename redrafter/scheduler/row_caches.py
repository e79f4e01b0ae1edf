"""The keys and values of the rows of a running batch, on a paged or a dense cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from redrafter.cache.block_manager import BlockTable
from redrafter.cache.dense import DenseCache
from redrafter.cache.kv_cache import KVCache
from redrafter.cache.paged import PagedCache, stack_block_tables
from redrafter.cache.states import NO_SNAPSHOTS, Snapshots
from redrafter.cache.to_device import MoveIndices, to_device
from redrafter.drafting.proposer import Proposer
from redrafter.drafting.vocabulary_map import VocabularyMap
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.model.target import Target
from redrafter.scheduler.paged_memory import PagedMemory
from redrafter.scheduler.sequence import TokenSequence
from redrafter.scheduler.sequence_blocks import draft_tables_of, tables_of


@dataclass(frozen=True)
class CachePair:
    """Keys and values of the same rows, of the target and of a draft model.

    Attributes:
        target: The target's keys and values.
        draft: The draft model's keys and values; None where there is none.
    """

    target: KVCache
    draft: KVCache | None = None

    @cached_property
    def all(self) -> list[KVCache]:
        """The caches that there are."""
        return [self.target] if self.draft is None else [self.target, self.draft]


class PagedRows:
    """Rows whose keys and values are in blocks that their sequences hold.

    Attributes:
        tables: Ids of the blocks of each row, `[R, M]` int32; 0 where a row has fewer.
        draft_tables: The same for a draft model with another vocabulary, `[R, M']` int32; None without one.
        state_rows: The row of each row's recurrent states in their store, `[R]` int64; 0 where there are no states.
    """

    def __init__(self, memory: PagedMemory, has_draft_model: bool, vocabulary: VocabularyMap | None = None):
        """Begin without rows.

        Args:
            memory: The blocks.
            has_draft_model: Whether a draft model reads the sequences too.
            vocabulary: That model's tokens for each of the target's; None where its ids are the target's.
        """
        self._memory = memory
        self._draft_store = memory.draft_store if has_draft_model else None
        self.tables = torch.zeros(0, 0, dtype=torch.int32, device=memory.target.device)
        self._vocabulary = vocabulary
        self.draft_tables = None if vocabulary is None else self.tables.clone()
        self.state_rows = torch.zeros(0, dtype=torch.long, device=memory.target.device)

    def reserve(self, rows: int, positions: int) -> None:
        """Grow the tables to at least this number of rows and of positions per row."""
        # A new tensor: steps captured over the old tables were dropped by the caller.
        self.tables = _enlarged(self.tables, rows, positions // BLOCK_SIZE)
        if self.draft_tables is not None:
            self.draft_tables = _enlarged(self.draft_tables, rows, self._draft_blocks(positions))
        self.state_rows = pad(self.state_rows, (0, rows - len(self.state_rows)))

    def _draft_blocks(self, positions: int) -> int:
        """Return the most draft-model blocks that a sequence of this number of positions needs."""
        if self._vocabulary is None:
            return positions // BLOCK_SIZE
        slots = len(self._vocabulary.start) + self._vocabulary.max_pieces * positions
        return -(-slots // BLOCK_SIZE)

    def of_prompts(self, sequences: Sequence[TokenSequence]) -> CachePair:
        """Return caches whose rows are these sequences, to read their prompts into."""
        device, block_tables = self.tables.device, tables_of(sequences)
        tables = draft_tables = stack_block_tables(block_tables, device)
        if self.draft_tables is not None:
            draft_tables = stack_block_tables(draft_tables_of(sequences), device)
        snapshots = {row: table.snapshots for row, table in enumerate(block_tables)}
        return self._on(tables, draft_tables, self._stack_state_rows(sequences), snapshots)

    def add(self, first: int, sequences: Sequence[TokenSequence], read: CachePair, rows: Sequence[int]) -> None:
        """Give the rows from `first` on to sequences whose prompts were read into rows `rows` of `read`."""
        written = slice(first, first + len(sequences))
        # Rows are written in place, since captured steps read the tables where they are.
        self.tables[written] = self._stack(tables_of(sequences), self.tables)
        if self.draft_tables is not None:
            self.draft_tables[written] = self._stack(draft_tables_of(sequences), self.draft_tables)
        self.state_rows[written] = self._stack_state_rows(sequences)

    def update(self, sequences: Sequence[TokenSequence]) -> None:
        """Copy the ids of blocks into the rows of sequences, after these were given some."""
        rows = [sequence.row for sequence in sequences]
        assert all(row is not None for row in rows), "the sequences step"
        self._append(self.tables, rows, tables_of(sequences))
        if self.draft_tables is not None:
            self._append(self.draft_tables, rows, draft_tables_of(sequences))

    @staticmethod
    def _append(tables: Tensor, rows: Sequence[int | None], block_tables: Sequence[BlockTable]) -> None:
        """Copy the ids of blocks added since the last copy, and not all of them: a long sequence has thousands."""
        new = [
            (row, column, block_table.blocks[column])
            for row, block_table in zip(rows, block_tables, strict=True)
            # `copied` is 0 for a new table, so this also covers rows that were written before they grew.
            for column in range(block_table.copied, min(len(block_table.blocks), tables.shape[1]))
        ]
        for block_table in block_tables:
            block_table.copied = len(block_table.blocks)
        # One copy of all new entries, as a round may grow many rows.
        if new:
            row, column, block = to_device(new, tables.device, torch.long).unbind(1)
            tables.index_put_((row, column), block.to(tables.dtype))

    @staticmethod
    def _stack(block_tables: Sequence[BlockTable], like: Tensor) -> Tensor:
        """Return the ids of the blocks of block tables, as wide as `like`, and record that they were copied."""
        for block_table in block_tables:
            block_table.copied = len(block_table.blocks)
        return stack_block_tables(block_tables, like.device, like.shape[1])

    def _stack_state_rows(self, sequences: Sequence[TokenSequence]) -> Tensor:
        """Return where the recurrent states of sequences are, `[B]` int64."""
        return to_device([table.state_row for table in tables_of(sequences)], self.tables.device, torch.long)

    def move(self, source: Sequence[int], to: Sequence[int], indices: MoveIndices) -> None:
        """Copy the tables of some rows to as many others; `indices` are those of `move_indices`."""
        old, new = indices
        for tables in (*self._all_tables(), self.state_rows):
            tables[new] = tables[old]

    def clear(self, rows: slice) -> None:
        """Detach rows from their blocks: they then write to block 0, which no sequence owns."""
        for tables in (*self._all_tables(), self.state_rows):
            tables[rows] = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that rows hold for positions, used or not."""
        return sum(tables.nbytes for tables in self._all_tables())

    def prepare(self, rows: int, longest: int, longest_draft: int, proposer: Proposer) -> None:
        """Do nothing: sequences receive blocks before a step."""

    def of_step(self, rows: int, window: int) -> CachePair:
        """Return the caches of the first rows for steps that see a window of their positions."""
        tables = self.tables[:rows, : window // BLOCK_SIZE]
        draft_tables = self._all_tables()[-1][:rows, : self._draft_blocks(window)]
        return self._on(tables, draft_tables, self.state_rows[:rows])

    def _all_tables(self) -> list[Tensor]:
        return [self.tables] if self.draft_tables is None else [self.tables, self.draft_tables]

    def _on(
        self, tables: Tensor, draft_tables: Tensor, state_rows: Tensor, snapshots: Snapshots = NO_SNAPSHOTS
    ) -> CachePair:
        target = PagedCache(self._memory.store, tables, state_rows, snapshots)
        if self._draft_store is None:
            return CachePair(target)
        # A draft model reads the last committed token again at each step, so its states are those before it.
        before = {row: {count - 1: at for count, at in each.items()} for row, each in snapshots.items()}
        return CachePair(target, PagedCache(self._draft_store, draft_tables, state_rows, before))


class DenseRows:
    """Rows with their own buffers, for any device and any supported model; with the methods of `PagedRows`."""

    def __init__(self, target: Target, draft_model: Target | None, rows: int):
        """Begin without buffers. rows: most rows at once."""
        self._target, self._draft_model, self._all_rows = target, draft_model, rows
        self._caches: list[DenseCache] = []  # of the target and of the draft model; none before the first prompts

    def reserve(self, rows: int, positions: int) -> None:
        """Do nothing: buffers grow as sequences do."""

    def of_prompts(self, sequences: Sequence[TokenSequence]) -> CachePair:
        """Return empty caches with space for the prompts."""
        slots = max(sequence.prefill_length for sequence in sequences)
        draft_slots = max(sequence.draft_length(sequence.prefill_length) for sequence in sequences)
        # The caches that the first prompts are read into become the caches of all rows, so they have all rows.
        rows = len(sequences) if self._caches else self._all_rows
        return CachePair(*self._make(rows, len(sequences), slots, draft_slots))

    def _make(self, rows: int, used: int, *slots: int) -> list[DenseCache]:
        """Return empty caches for `rows` rows, of which the first `used` take part, with slots for each model."""
        models = [model for model in (self._target, self._draft_model) if model is not None]
        caches: list[DenseCache] = [model.new_cache(rows) for model in models]
        for cache, count in zip(caches, slots, strict=False):
            cache.use_rows(used)
            cache.reserve(count)
        return caches

    def add(self, first: int, sequences: Sequence[TokenSequence], read: CachePair, rows: Sequence[int]) -> None:
        """Copy keys and values of prompts into the rows from `first` on."""
        parts = [cache for cache in read.all if isinstance(cache, DenseCache)]  # all: `of_prompts` has made them
        if not self._caches:
            self._caches = parts
            if list(rows) == list(range(len(rows))):
                return
            self._caches = self._make(self._all_rows, 1, *(cache.window for cache in parts))
        for mine, part in zip(self._caches, parts, strict=True):
            mine.reserve(max(mine.window, part.window))
            mine.write_rows(range(first, first + len(rows)), part, rows)

    def move(self, source: Sequence[int], to: Sequence[int], indices: MoveIndices) -> None:
        """Copy the keys and values of some rows to as many others."""
        for cache in self._caches:
            cache.write_rows(to, cache, source)

    def clear(self, rows: slice) -> None:
        """Forget what a drafter has not stored yet if no rows are left; those not in use take no part in steps."""
        for cache in self._caches if rows.start == 0 else ():
            cache.forget_later()

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys and values."""
        return sum(p.nbytes for cache in self._caches for p in cache.pools)

    def prepare(self, rows: int, longest: int, longest_draft: int, proposer: Proposer) -> None:
        """Let only the first rows take part in the next step of a proposer, with slots for its nodes.

        `longest` and `longest_draft` count the committed tokens of the longest row, as either model reads it.
        """
        for cache, committed in zip(self._caches, (longest, longest_draft), strict=False):
            if rows != cache.rows:
                cache.use_rows(rows)
            # One row that only appends needs no scratch slots, so its cache need not be copied to grow.
            if rows == proposer.scratch_slots == 1:
                cache.reserve_one_token(committed)
            else:
                cache.reserve(committed + proposer.depth + proposer.scratch_slots)

    def of_step(self, rows: int, window: int) -> CachePair:
        """Return the caches."""
        return CachePair(*self._caches)


RowCaches: TypeAlias = PagedRows | DenseRows
"""The keys and values of the rows of a running batch."""


def _enlarged(tables: Tensor, rows: int, blocks: int) -> Tensor:
    """Return a copy of the tables, padded with 0 to this number of rows and blocks."""
    larger = torch.zeros(rows, blocks, dtype=tables.dtype, device=tables.device)
    larger[: tables.shape[0], : tables.shape[1]] = tables
    return larger
