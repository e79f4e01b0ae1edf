"""Admission: which waiting sequences are given places and blocks, and which sequences give theirs up.

Where every place is taken, a client without any is given the place of another client's newest sequence, which goes on
later with the same tokens. Where blocks run out, the newest sequence waits until there are enough again. Schedulers in
other threads may hold blocks of the same cache: who has no sequence left to run then waits in turn, holding none.
"""

from collections.abc import Callable, Sequence

from redrafter.errors import CacheFullError
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.scheduler.limits import Limits
from redrafter.scheduler.places import Places
from redrafter.scheduler.running_batch import RunningBatch
from redrafter.scheduler.sequence import SequenceDelta, TokenSequence
from redrafter.scheduler.sequence_blocks import SequenceBlocks

__all__ = ["Admission"]

MIN_ROUNDS_IN_PLACE = 16  # rounds for which a sequence keeps its place, however many clients have none

# Waits for all forwards that were launched, which may end sequences, and returns whether there were any.
Settle = Callable[[], bool]


class Admission:
    """Gives sequences places and blocks, round by round.

    Attributes:
        preempted: Number of sequences put back into the queue so far.
    """

    def __init__(self, places: Places, batch: RunningBatch, blocks: SequenceBlocks | None):
        """Admit nothing yet.

        Args:
            places: The sequences that wait and that hold places.
            batch: The rows of the sequences that step.
            blocks: The blocks of the cache; None for a dense one, which has room for every place.
        """
        self._places, self._batch, self._blocks = places, batch, blocks
        self._rounds = self.preempted = 0

    def admit(self, limits: Limits, settle: Settle, *, reads_beside: bool) -> None:
        """Give places and blocks to the next sequences of the queue, as many as there is room for.

        To be called once a round. If there is room for none while none runs, wait a moment for others to make some.

        Args:
            limits: What may run at once.
            settle: See `Settle`.
            reads_beside: Whether steps read prompts, so that one alone costs no forward.
        """
        self._rounds += 1
        if self._blocks is None or self._blocks.have_turn:
            self._admit(limits, settle, reads_beside=reads_beside)
        if self._blocks is not None:
            if self._places.waiting and not self._places.running:
                self._blocks.wait()
            else:
                self._blocks.end_wait()

    def _admit(self, limits: Limits, settle: Settle, *, reads_beside: bool) -> None:
        places = self._places
        free = limits.max_batch_size - places.running
        if not reads_beside and places.running and 0 < free < min(limits.admit_together, places.waiting):
            return
        while (waiting := places.next_waiting()) is not None:
            sequence, placeless = waiting
            may_preempt = placeless and not limits.guaranteed_no_evict
            if places.running >= limits.max_batch_size and not (may_preempt and self._free_a_place(settle)):
                return
            if not places.give(sequence):
                continue
            if not self._allocate(sequence, limits, settle, may_preempt):
                places.put_back(sequence)
                return

    def _allocate(self, sequence: TokenSequence, limits: Limits, settle: Settle, may_preempt: bool) -> bool:
        """Give blocks to a sequence that was given a place, and return whether there were enough.

        If it could never get enough, it ends with an error.

        Args:
            sequence: An admitted sequence.
            limits: What may run at once.
            settle: See `Settle`.
            may_preempt: Whether another client's sequence may be preempted, as its own client has no other place.
        """
        earlier_round, sequence.admitted_round = sequence.admitted_round, self._rounds
        if self._blocks is None:
            return True
        positions = sequence.max_length if limits.guaranteed_no_evict else sequence.prefill_length + 1
        slots = positions + self._batch.overshoot
        while sequence.block_table is None:
            try:
                self._blocks.allocate(sequence, slots)
            except CacheFullError as error:
                if not self._blocks.could_hold(sequence, slots):
                    self._places.end(sequence, SequenceDelta((), finish="error", error=error))
                    return True
                if not (may_preempt and self._free_a_place(settle, slots)):
                    sequence.admitted_round = earlier_round
                    return False
        if earlier_round is None:  # reading a preempted sequence again is not charged to its client
            self._places.charge(sequence, sequence.prefill_length - sequence.prefilled)
        return True

    def _free_a_place(self, settle: Settle, slots: int = 0) -> bool:
        """Preempt a sequence for a client without any place, and return whether there was one to preempt.

        It is the newest sequence of the client that has most places, never a client's only one, and none that has had
        its place for less than `MIN_ROUNDS_IN_PLACE` rounds: so each advances by some tokens whenever it has a place.

        Args:
            settle: See `Settle`.
            slots: Positions that the client's sequence needs. If all such sequences together hold less, none is
                preempted.
        """
        if self._blocks is None:
            return False
        candidates = [
            (sequence, sequence.block_table)
            for sequence in self._places.sequences
            if sequence.block_table is not None
            and self._rounds - (sequence.admitted_round or 0) >= MIN_ROUNDS_IN_PLACE
            and self._places.of_client(sequence.client) > 1
        ]
        blocks = self._blocks.free + sum(len(table.blocks) for _, table in candidates)
        if not candidates or blocks * BLOCK_SIZE < slots:
            return False
        chosen = self._newest([sequence for sequence, _ in candidates])
        settle()
        if not chosen.ended:
            self._preempt(chosen)
        return True

    def _newest(self, sequences: Sequence[TokenSequence]) -> TokenSequence:
        """Return the newest sequence of the client with most places, never the oldest of all unless it is alone."""
        return max(sequences, key=lambda sequence: (self._places.of_client(sequence.client), sequence.arrival))

    def _preempt(self, sequence: TokenSequence) -> None:
        self.preempted += 1
        self._places.put_back(sequence)

    def grow(self, settle: Settle) -> list[TokenSequence]:
        """Give each row blocks for its next step, and preempt the newest sequences where there are too few.

        Args:
            settle: See `Settle`.

        Returns:
            The sequences that were given blocks; some of them may have been preempted since.
        """
        if self._blocks is None:
            return []
        grown = []
        for sequence in tuple(self._batch.rows):
            while sequence.block_table is not None:  # until it ends or is preempted itself
                longest = len(sequence.tokens) + sequence.launched * (self._batch.depth + 1)
                slots = min(longest, sequence.max_length) + self._batch.overshoot
                try:
                    if self._blocks.grow(sequence, slots):
                        grown.append(sequence)
                    break
                except CacheFullError as error:
                    if settle():
                        continue  # a sequence may have ended
                    if self._blocks.could_hold(sequence, slots):
                        self._preempt(self._newest(self._places.sequences))
                    else:
                        self._places.end(sequence, SequenceDelta((), finish="error", error=error))
        return grown
