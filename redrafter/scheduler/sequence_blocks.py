"""The blocks of a paged memory that sequences hold, where others may find their tokens."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

from redrafter.cache.block_manager import BlockTable
from redrafter.errors import CacheFullError
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.scheduler.paged_memory import PagedMemory
from redrafter.scheduler.sequence import TokenSequence

LONGEST_WAIT = 0.05  # seconds, after which a call that waits for blocks looks at its deadline and cancellations again


def tables_of(sequences: Sequence[TokenSequence]) -> list[BlockTable]:
    """Return the block tables of sequences that all have one."""
    tables = [sequence.block_table for sequence in sequences if sequence.block_table is not None]
    assert len(tables) == len(sequences), "a sequence has no blocks"
    return tables


def draft_tables_of(sequences: Sequence[TokenSequence]) -> list[BlockTable]:
    """Return the block tables of sequences in the draft model's vocabulary, all of which have one."""
    tables = [s.draft.block_table for s in sequences if s.draft is not None and s.draft.block_table is not None]
    assert len(tables) == len(sequences), "a sequence has no blocks"
    return tables


class SequenceBlocks:
    """Gives sequences their blocks of a paged KV cache and takes them back.

    A draft model with the target's vocabulary has its keys and values in blocks of the same ids. One with another
    vocabulary has other tokens for each sequence, and blocks of its own.
    """

    def __init__(self, memory: PagedMemory, has_draft_model: bool, reuse: bool):
        """Hand out the blocks of a memory; with `reuse`, equal prefixes share them."""
        # Where recurrent states of prefixes are not kept, their keys and values alone are of no use.
        stores = [store for store in (memory.store, memory.draft_store) if store is not None]
        reuse = reuse and all(store.states is None or store.prefix_states for store in stores)
        self._memory, self._reuse = memory, reuse
        # Without a draft model, no prompt is read into the cache of drafts, so none of its prefixes can be reused.
        self._publishes = reuse and (memory.draft_store is None or has_draft_model)
        self._rope = memory.target.rope
        # The last allocation that failed, the state that it failed in, and why.
        self._refused: tuple[TokenSequence, int, tuple[object, ...], str] | None = None

    @property
    def free(self) -> int:
        """Number of blocks that could be allocated now."""
        return self._memory.blocks.num_free_blocks

    def could_hold(self, sequence: TokenSequence, slots: int) -> bool:
        """Return whether this number of positions of a sequence fits into an empty cache."""
        fits = slots <= self._memory.blocks.num_blocks * BLOCK_SIZE
        if sequence.draft is None or self._memory.draft_blocks is None:
            return fits
        return fits and sequence.draft_bound(slots) <= self._memory.draft_blocks.num_blocks * BLOCK_SIZE

    @property
    def have_turn(self) -> bool:
        """Return whether no earlier waiter needs blocks of the same cache."""
        turns = self._memory.turns[:1]
        return not turns or turns[0] is self

    def wait(self) -> None:
        """Wait briefly, in turn, for blocks that other schedulers hold; the caller's own sequences hold none."""
        with self._memory.released:
            if self not in self._memory.turns:
                self._memory.turns.append(self)
            # Blocks released since the last attempt might be enough.
            if not self.have_turn or (self._refused and self._refused[2] == self._state()):
                self._memory.released.wait(LONGEST_WAIT)

    def end_wait(self) -> None:
        """Let others take blocks, if this one has waited for some."""
        if self in self._memory.turns:
            with self._memory.released:
                self._memory.turns.remove(self)
                self._memory.released.notify_all()

    def allocate(self, sequence: TokenSequence, slots: int) -> None:
        """Allocate blocks for this number of positions of an admitted sequence, reusing its longest cached prefix.

        Raises:
            CacheFullError: Too few blocks are free; the sequence is unchanged.
        """
        # It is tried in every round, and looking up the prefix of a long sequence takes milliseconds.
        if self._refused is not None and self._refused[:3] == (sequence, slots, self._state()):
            raise CacheFullError(self._refused[3])
        with self._handing_out():
            try:
                self._allocate(sequence, slots)
            except CacheFullError as error:
                # Snapshot after this attempt, whose own blocks, taken and given back, are no reason for another one.
                self._refused = sequence, slots, self._state(), str(error)
                raise

    def _state(self) -> tuple[object, ...]:
        """Return the state that an allocation depends on: it fails again as long as this stays equal."""
        managers = [x for x in (self._memory.blocks, self._memory.draft_blocks) if x is not None]
        return tuple((manager, manager.freed) for manager in managers)

    def _allocate(self, sequence: TokenSequence, slots: int) -> None:
        tokens = sequence.tokens[: sequence.prefill_length]
        # A cached prefix has no logits, and past a change of rope it would be other keys.
        reuse = self._reuse and not sequence.needs_scores and self._is_steady(sequence)
        try:
            sequence.block_table = self._memory.blocks.admit(
                tokens, slots, reuse, self._salt(sequence), publishes=self._publishes
            )
            if (draft := sequence.draft) is not None and (blocks := self._memory.draft_blocks) is not None:
                # A draft prefix past the target's would hold tokens that the target must read first.
                text = draft.text.ids[: sequence.draft_length(sequence.block_table.reused) + 1]
                draft.block_table = blocks.admit(text, sequence.draft_bound(slots), reuse, sequence.request.cache_salt)
                draft.prefilled = draft.block_table.reused
        except CacheFullError:
            self._give_back(sequence)  # both or neither: the sequence stays in the queue, where it may hold no blocks
            raise
        self._memory.restore_states(sequence.block_table)
        if sequence.needs_scores:
            sequence.prompt_scores.clear()  # it may have been preempted halfway
        sequence.prefilled = sequence.block_table.reused
        sequence.reused = max(sequence.reused, sequence.prefilled)

    @contextmanager
    def _handing_out(self) -> Iterator[None]:
        """Hold the lock, and launch the copies that handing out blocks makes due, even where there were too few."""
        with self._memory.lock:
            try:
                yield
            # Blocks that were evicted before the failure are reusable already, so their copies must not be lost.
            finally:
                self._memory.copy_blocks()

    def grow(self, sequence: TokenSequence, slots: int) -> bool:
        """Allocate blocks for at least this number of positions, and return whether more blocks were needed.

        Raises:
            CacheFullError: Too few blocks are free. The sequence is unchanged, but for blocks of the target that it was
                given where only those of a draft model were too few.
        """
        grown = False
        for table, count in zip(sequence.block_tables, (slots, sequence.draft_bound(slots)), strict=False):
            if count > len(table.blocks) * BLOCK_SIZE:
                with self._handing_out():
                    table.manager.grow(table, count)
                grown = True
        return grown

    def publish(self, sequence: TokenSequence, count: int) -> None:
        """Let later sequences find the full blocks of the first `count` tokens of a sequence."""
        if self._publishes and self._is_steady(sequence):
            draft = [] if sequence.draft is None else sequence.draft.text.ids[: sequence.draft_length(count)]
            with self._memory.lock:
                for table, tokens in zip(sequence.block_tables, (sequence.tokens[:count], draft), strict=False):
                    table.manager.publish(table, tokens)

    def withdraw(self, sequence: TokenSequence) -> None:
        """Let no later sequence find the blocks of this one, whose contents are unknown after an error."""
        with self._memory.lock:
            for table in sequence.block_tables:
                table.manager.withdraw(table)

    def release(self, sequence: TokenSequence, keep: bool) -> None:
        """Take the blocks of a sequence back, if it has any.

        Others may find its keys and values if `keep` says so, which they may not after an error.
        """
        if sequence.block_table is None:
            return
        if keep:
            self.publish(sequence, sequence.prefilled if sequence.row is None else self._cached(sequence))
        with self._memory.released:
            self._give_back(sequence)
            self._memory.released.notify_all()

    @staticmethod
    def _give_back(sequence: TokenSequence) -> None:
        for table in sequence.block_tables:
            table.manager.release(table)
        sequence.block_table = None
        if sequence.draft is not None:
            sequence.draft.block_table = None

    def _is_steady(self, sequence: TokenSequence) -> bool:
        """Return whether a sequence's blocks depend on its tokens alone, so that others may share them.

        The ids of two prompts with different images are the same.
        """
        if sequence.request.images is not None:
            return False
        return self._rope is None or self._rope.keeps_keys(len(sequence.request.prompt), sequence.max_length)

    def _salt(self, sequence: TokenSequence) -> Hashable:
        """Return the salt under which a sequence shares blocks: adapters change keys and values."""
        request = sequence.request
        salt = request.cache_salt if request.adapter is None else (request.cache_salt, request.adapter.number)
        key = None if self._rope is None else self._rope.prefix_key(len(request.prompt))
        return (salt, key) if key else salt

    def _cached(self, sequence: TokenSequence) -> int:
        """Count the leading tokens of a decoding sequence whose keys and values are in every cache."""
        if self._memory.draft_store is None:
            return len(sequence.tokens) - 1  # all but the pending token
        if not sequence.request.params.speculate:
            return min(len(sequence.tokens) - 2, len(sequence.request.prompt))  # the draft model may have read no more
        # The draft model may have proposed the last one and not read it, nor the drafts that a step has copied.
        cached = len(sequence.tokens) - 2 - sequence.unread_copies
        # A prompt is shared even where the draft model has not read it: its drafts get worse, the tokens do not change.
        return (
            cached
            if sequence.unread_from is None
            else min(cached, max(sequence.unread_from, len(sequence.request.prompt)))
        )
