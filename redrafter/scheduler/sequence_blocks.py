"""The blocks of the KV cache that sequences hold, and which of their tokens other sequences may find there."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from redrafter.cache.block_manager import BlockManager, BlockTable
from redrafter.errors import CacheFullError
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.scheduler.cuda_graphs import CUDAGraphRunner
from redrafter.scheduler.sequence import TokenSequence

LONGEST_WAIT = 0.05  # seconds, after which a call that waits for blocks looks at its deadline and cancellations again


def tables_of(sequences: Sequence[TokenSequence]) -> list[BlockTable]:
    """Return the block tables of sequences that all have one."""
    tables = [sequence.block_table for sequence in sequences if sequence.block_table is not None]
    assert len(tables) == len(sequences), "a sequence has no blocks"
    return tables


def draft_tables_of(sequences: Sequence[TokenSequence]) -> list[BlockTable]:
    """Return the block tables of the draft model's texts of sequences that all have one."""
    tables = [sequence.draft_block_table for sequence in sequences if sequence.draft_block_table is not None]
    assert len(tables) == len(sequences), "a sequence has no blocks"
    return tables


class SequenceBlocks:
    """Gives sequences their blocks of a paged KV cache and takes them back.

    A draft model with the target's vocabulary has its keys and values in blocks of the same ids. One with another
    vocabulary has a text of its own for each sequence, and blocks of its own.
    """

    def __init__(self, graphs: CUDAGraphRunner, has_draft_model: bool, reuse: bool):
        """Hand out the blocks of a runner's cache.

        Args:
            graphs: Owner of the blocks and of their lock.
            has_draft_model: Whether a draft model reads every prompt and draft into a cache of the same blocks.
            reuse: Whether sequences share blocks of equal prefixes, unless a model keeps recurrent states.
        """
        # A state of a prefix is not kept, and its keys and values alone are of no use.
        stores = (graphs.store, graphs.draft_store)
        reuse = reuse and all(store is None or store.states is None for store in stores)
        self._graphs, self._reuse = graphs, reuse
        # Without a draft model, no prompt is read into the cache of drafts, so none of its prefixes can be reused.
        self._publishes = reuse and (graphs.draft_store is None or has_draft_model)
        self._rope = graphs.target.rope
        self._refused: tuple[tuple[object, ...], str] | None = None  # the last allocation that failed, and why

    @property
    def free(self) -> int:
        """Number of blocks that could be handed out now."""
        return self._graphs.blocks.num_free_blocks

    def could_hold(self, sequence: TokenSequence, slots: int) -> bool:
        """Tell whether so many positions of a sequence fit into an empty cache."""
        fits = slots <= self._graphs.blocks.num_blocks * BLOCK_SIZE
        if sequence.draft_text is None or self._graphs.draft_blocks is None:
            return fits
        return fits and sequence.draft_bound(slots) <= self._graphs.draft_blocks.num_blocks * BLOCK_SIZE

    @property
    def have_turn(self) -> bool:
        """Whether nobody waits for blocks of the same cache who came before."""
        turns = self._graphs.turns[:1]
        return not turns or turns[0] is self

    def wait(self) -> None:
        """Wait in turn for blocks that others hold, but not for long. The caller's own sequences hold none."""
        with self._graphs.released:
            if self not in self._graphs.turns:
                self._graphs.turns.append(self)
            # What was released since the last attempt might be enough.
            if not self.have_turn or (self._refused and self._refused[0] == self._attempt(*self._refused[0][:2])):
                self._graphs.released.wait(LONGEST_WAIT)

    def end_wait(self) -> None:
        """Let others take blocks, if this one has waited for some."""
        if self in self._graphs.turns:
            with self._graphs.released:
                self._graphs.turns.remove(self)
                self._graphs.released.notify_all()

    def allocate(self, sequence: TokenSequence, slots: int) -> None:
        """Give an admitted sequence blocks for so many positions, with the longest cached prefix of its tokens.

        Raises:
            CacheFullError: Too few blocks are free; the sequence is unchanged.
        """
        # It is tried in every round, and looking for the prefix of a long text takes milliseconds.
        if self._refused is not None and self._refused[0] == self._attempt(sequence, slots):
            raise CacheFullError(self._refused[1])
        with self._handing_out():
            try:
                self._allocate(sequence, slots)
            except CacheFullError as error:
                # As things are now: blocks that this attempt has taken and given back are no reason for another one.
                self._refused = self._attempt(sequence, slots), str(error)
                raise

    def _attempt(self, sequence: Any, slots: Any) -> tuple[object, ...]:
        """Return what decides whether an allocation fails: it fails again as long as this stays equal."""
        managers = [x for x in (self._graphs.blocks, self._graphs.draft_blocks) if x is not None]
        return sequence, slots, *((manager, manager.freed) for manager in managers)

    def _allocate(self, sequence: TokenSequence, slots: int) -> None:
        tokens = sequence.tokens[: sequence.prefill_length]
        # What is found in the cache has no logits, and past a change of rope it would be other keys.
        reuse = self._reuse and not sequence.needs_scores and self._is_steady(sequence)
        sequence.block_table = self._graphs.blocks.admit(tokens, slots, reuse, self._salt(sequence))
        if sequence.draft_text is not None:
            try:
                sequence.draft_block_table = self._admit_draft_text(sequence, slots, reuse)
            except CacheFullError:
                self._graphs.blocks.release(sequence.block_table)
                sequence.block_table = None
                raise
            sequence.draft_prefilled = sequence.draft_block_table.reused
        if sequence.needs_scores:
            sequence.prompt_scores.clear()  # it may have been preempted halfway
        sequence.prefilled = sequence.block_table.reused
        sequence.reused = max(sequence.reused, sequence.prefilled)

    @contextmanager
    def _handing_out(self) -> Iterator[None]:
        """Hold the lock, and launch the copies that handing out blocks makes due, even where there were too few."""
        with self._graphs.lock:
            try:
                yield
            finally:
                self._graphs.copy_blocks()

    def _admit_draft_text(self, sequence: TokenSequence, slots: int, reuse: bool) -> BlockTable:
        """Give a sequence blocks for its draft text, with a cached prefix no longer than what the target has found."""
        text, blocks = sequence.draft_text, self._graphs.draft_blocks
        assert text is not None
        assert blocks is not None
        assert sequence.block_table is not None
        draft_slots = sequence.draft_bound(slots)
        found = sequence.draft_length(sequence.block_table.reused)
        return blocks.admit(text.ids[: found + 1], draft_slots, reuse, sequence.cache_salt)

    def grow(self, sequence: TokenSequence, slots: int) -> bool:
        """Give a sequence blocks for at least so many positions, and return whether it needed more than it had.

        Raises:
            CacheFullError: Too few blocks are free. The sequence is unchanged, but for blocks of the target that it was
                given where only those of a draft model were too few.
        """
        grown = self._grow(self._graphs.blocks, sequence.block_table, slots)
        if sequence.draft_text is None:
            return grown
        return self._grow(self._graphs.draft_blocks, sequence.draft_block_table, sequence.draft_bound(slots)) or grown

    def _grow(self, blocks: BlockManager | None, block_table: BlockTable | None, slots: int) -> bool:
        assert blocks is not None
        assert block_table is not None
        if slots <= len(block_table.blocks) * BLOCK_SIZE:
            return False
        with self._handing_out():
            blocks.grow(block_table, slots)
        return True

    def publish(self, sequence: TokenSequence, count: int) -> None:
        """Let later sequences find the full blocks of the first `count` tokens of a sequence."""
        assert sequence.block_table is not None
        if self._publishes and self._is_steady(sequence):
            with self._graphs.lock:
                self._graphs.blocks.publish(sequence.block_table, sequence.tokens[:count])
                if sequence.draft_text is not None:
                    assert self._graphs.draft_blocks is not None
                    assert sequence.draft_block_table is not None
                    read = sequence.draft_text.ids[: sequence.draft_length(count)]
                    self._graphs.draft_blocks.publish(sequence.draft_block_table, read)

    def withdraw(self, sequence: TokenSequence) -> None:
        """Let no later sequence find what this one has computed, as after an error nobody knows what is in it."""
        tables = (self._graphs.blocks, sequence.block_table), (self._graphs.draft_blocks, sequence.draft_block_table)
        with self._graphs.lock:
            for blocks, block_table in tables:
                if blocks is not None and block_table is not None:
                    blocks.withdraw(block_table)

    def release(self, sequence: TokenSequence, keep: bool) -> None:
        """Take the blocks of a sequence back, if it has any.

        Args:
            sequence: A sequence that decodes, if it has a row, or whose prompt is being read.
            keep: Whether its keys and values may be found by others, which they may not after an error.
        """
        if sequence.block_table is None:
            return
        if keep:
            self.publish(sequence, sequence.prefilled if sequence.row is None else self._cached(sequence))
        with self._graphs.released:
            self._graphs.blocks.release(sequence.block_table)
            if sequence.draft_block_table is not None:
                assert self._graphs.draft_blocks is not None
                self._graphs.draft_blocks.release(sequence.draft_block_table)
            self._graphs.released.notify_all()
        sequence.block_table = sequence.draft_block_table = None

    def _is_steady(self, sequence: TokenSequence) -> bool:
        """Tell whether a sequence's blocks hold what those of any sequence with the same text would hold.

        The ids of two prompts with different images are the same.
        """
        if sequence.images is not None:
            return False
        return self._rope is None or self._rope.keeps_keys(len(sequence.prompt), sequence.max_length)

    def _salt(self, sequence: TokenSequence) -> Hashable:
        """Return what sequences must have in common to share blocks."""
        key = None if self._rope is None else self._rope.prefix_key(len(sequence.prompt))
        return (sequence.prefix_salt, key) if key else sequence.prefix_salt

    def _cached(self, sequence: TokenSequence) -> int:
        """Count the leading tokens of a decoding sequence whose keys and values are in every cache."""
        if self._graphs.draft_store is None:
            return len(sequence.tokens) - 1  # all but the pending token
        if not sequence.params.speculate:
            return min(len(sequence.tokens) - 2, len(sequence.prompt))  # the draft model may have read no more
        return len(sequence.tokens) - 2  # the draft model may have proposed the last one and not read it
