"""The places of a scheduler: which sequences wait for one, which hold one, and what those hold with it.

A sequence with a place has blocks of the cache. While its prompt is being read it has no row of the batch, and then it
has one.
"""

import threading
from collections import deque
from collections.abc import Sequence

from redrafter.scheduler.limits import Limits
from redrafter.scheduler.running_batch import RunningBatch
from redrafter.scheduler.sequence import SequenceDelta, TokenSequence
from redrafter.scheduler.sequence_blocks import SequenceBlocks
from redrafter.scheduler.stats import Stats
from redrafter.scheduler.waiting_queue import WaitingQueue

__all__ = ["Places"]

MAX_CANCELLATIONS_PER_ROUND = 512  # reporting each to its sink takes some microseconds


class Places:
    """Sequences from their arrival to their end.

    `enqueue` and `cancel` may be called from any thread, all else from the one that runs the rounds.

    Attributes:
        prefilling: Sequences with a place whose prompts are being read, in the order of their admission.
    """

    def __init__(self, batch: RunningBatch, blocks: SequenceBlocks | None):
        """Begin without sequences.

        Args:
            batch: The rows of the sequences that step.
            blocks: The blocks of the cache; None for a dense one.
        """
        self._batch, self._blocks = batch, blocks
        self.prefilling: dict[TokenSequence, None] = {}
        self._lock = threading.Lock()  # of the queue and of the cancelled sequences
        self._queue = WaitingQueue()
        self._cancelled: deque[TokenSequence] = deque()  # not ended yet; those with a place come first
        self._arrivals = 0

    @property
    def idle(self) -> bool:
        """Whether there is no sequence: none waits, holds a place, or must still be told that it was cancelled."""
        return not (self._queue or self._cancelled or self.prefilling or self._batch.rows)

    @property
    def waiting(self) -> int:
        """Number of sequences that wait for a place."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Number of sequences that hold a place: those that step and those whose prompts are being read."""
        return len(self.prefilling) + len(self._batch.rows)

    @property
    def clients(self) -> int:
        """Number of clients with a sequence that waits or holds a place."""
        return self._queue.clients

    def of_client(self, name: str) -> int:
        """Count the places that a client holds."""
        return self._queue.running(name)

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """Sequences with a place: those in rows of the batch, then those whose prompts are being read, each once.

        A sequence is in both `batch.rows` and `prefilling` if an error occurred while its row was added.
        """
        return tuple(dict.fromkeys((*self._batch.rows, *self.prefilling)))

    def enqueue(self, sequences: Sequence[TokenSequence], limits: Limits) -> None:
        """Queue the sequences of one client, all or none of them.

        Raises:
            QueueFullError: Too many sequences wait, see `Limits.refuse_if_full`.
        """
        with self._lock:
            limits.refuse_if_full(self._queue, self.running, sequences[0].client, len(sequences))
            for sequence in sequences:
                sequence.stats = Stats(accepted_by_depth=[0] * self._batch.depth)
                self._arrivals += 1
                sequence.arrival = self._arrivals
                self._queue.add(sequence)

    def cancel(self, sequences: Sequence[TokenSequence]) -> None:
        """Let `end_cancelled` end sequences, except those that have ended or were never queued."""
        with self._lock:
            for sequence in sequences:
                if sequence.ended or sequence.cancelled or not sequence.arrival:
                    continue
                sequence.cancelled = True
                if sequence in self._queue:
                    self._queue.remove(sequence)
                    self._cancelled.append(sequence)
                else:
                    self._cancelled.appendleft(sequence)

    def cancel_all(self) -> None:
        """Let `end_cancelled` end every sequence."""
        with self._lock:
            waiting = self._queue.clear()
            for sequence in waiting:
                sequence.cancelled = True
            self._cancelled.extend(waiting)
        self.cancel(self.sequences)

    def end_cancelled(self) -> None:
        """End cancelled sequences, those with a place first, and as many as one round has time for."""
        for _ in range(min(len(self._cancelled), MAX_CANCELLATIONS_PER_ROUND)):
            sequence = self._cancelled.popleft()
            if not sequence.ended:
                self.end(sequence, SequenceDelta((), finish="cancelled"))

    def next_waiting(self) -> tuple[TokenSequence, bool] | None:
        """Return the sequence whose turn it is, and whether its client has no place at all; None if none waits."""
        with self._lock:
            sequence = self._queue.first()
            return None if sequence is None else (sequence, not self._queue.running(sequence.client))

    def give(self, sequence: TokenSequence) -> bool:
        """Give a waiting sequence a place, and return whether it still waited: it may have been cancelled meanwhile."""
        with self._lock:
            if sequence not in self._queue:
                return False
            self._queue.start(sequence)
            self.prefilling[sequence] = None
            return True

    def put_back(self, sequence: TokenSequence) -> None:
        """Let a sequence wait again. Its prefix may be in the cache when its turn comes, or is read anew."""
        self._take_back(sequence, keep=True)
        with self._lock:
            self._queue.put_back(sequence)

    def charge(self, sequence: TokenSequence, tokens: int) -> None:
        """Add tokens that were read or drawn for a sequence with a place to its client's account."""
        with self._lock:
            self._queue.charge(sequence, tokens)

    def end(self, sequence: TokenSequence, delta: SequenceDelta, keep: bool = True) -> None:
        """Take back what a sequence holds, and report its last delta.

        Args:
            sequence: A sequence that has not ended.
            delta: Its last delta.
            keep: Whether its keys and values may be reused, which they may not after an error.
        """
        placed = sequence.row is not None or sequence in self.prefilling
        if self._blocks is not None and not keep:
            self._blocks.withdraw(sequence)
        self._take_back(sequence, keep)
        with self._lock:
            if placed:
                self._queue.end(sequence)
            elif sequence in self._queue:
                self._queue.remove(sequence)
            sequence.ended = True
        sequence.sink(sequence, delta)

    def abandon(self) -> None:
        """Take back what sequences hold, without reporting anything to them."""
        for sequence in self.sequences:
            self._take_back(sequence, keep=False)
        self._queue.clear()
        if self._blocks is not None:
            self._blocks.end_wait()

    def _take_back(self, sequence: TokenSequence, keep: bool) -> None:
        """Take back the blocks and the row of a sequence. keep: whether its keys and values may be reused."""
        if self._blocks is not None:
            self._blocks.release(sequence, keep)
        if sequence.row is not None:
            self._batch.remove(sequence)
        self.prefilling.pop(sequence, None)
        sequence.prefilled = sequence.draft_prefilled = 0
