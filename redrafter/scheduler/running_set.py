"""The running set: sequences with slots, their admission, and their preemption.

A sequence with a slot has blocks of the cache. While its prompt is being read it has no row of the batch, and then it
has one.

Where slots or blocks are taken, a waiting sequence is given those of a sequence with a higher priority number. Where
every slot is taken by sequences of its own number, a client without any is given the slot of another client's newest
one. Where rows need more blocks than are free, the newest sequence of the highest number waits until there are enough
again. A preempted sequence continues later with the same tokens. Schedulers in other threads may hold blocks of the
same cache: one with no sequence left to run then waits in turn and holds no blocks.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from redrafter.errors import CacheFullError
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.scheduler.running_batch import RunningBatch
from redrafter.scheduler.sequence import Account, SequenceDelta, Stats, TokenSequence
from redrafter.scheduler.sequence_blocks import SequenceBlocks
from redrafter.scheduler.waiting_queue import Limits, WaitingQueue

MAX_CANCELLATIONS_PER_ROUND = 512  # reporting each to its sink takes some microseconds
MIN_ROUNDS_IN_PLACE = 16  # rounds for which a sequence keeps its slot, however many clients have none

# Waits for all forwards that were launched, which may end sequences, and returns whether there were any.
Settle = Callable[[], bool]


class RunningSet:
    """Tracks sequences from arrival to end: waiting ones, and ones that hold slots and blocks.

    `enqueue` and `cancel` may be called from any thread, all other methods only from the thread that runs the rounds.

    Attributes:
        prefilling: Sequences with a slot whose prompts are being read, in the order of their admission.
        preempted: Number of preemptions so far.
    """

    def __init__(self, batch: RunningBatch, blocks: SequenceBlocks | None, limits: Limits, settle: Settle):
        """Begin without sequences.

        Args:
            batch: The rows of the sequences that step.
            blocks: The blocks of the cache; None for a dense one, which has room for every slot.
            limits: Limits of the sequences that run and wait.
            settle: Waits for launched forwards.
        """
        self._batch, self._blocks, self._limits, self._settle = batch, blocks, limits, settle
        self.prefilling: dict[TokenSequence, None] = {}
        self._lock = threading.Lock()  # of the queue and of the cancelled sequences
        self._queue = WaitingQueue()
        self._cancelled: deque[TokenSequence] = deque()  # not ended yet; those with a slot come first
        self._arrivals = self._rounds = self.preempted = 0

    @property
    def idle(self) -> bool:
        """Return whether no sequence waits, holds a slot, or has a cancellation that is not reported yet."""
        return not (self._queue or self._cancelled or self.prefilling or self._batch.rows)

    @property
    def waiting(self) -> int:
        """Number of sequences that wait for a slot."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Number of sequences that hold a slot, whether they are decoding or their prompts are being read."""
        return len(self.prefilling) + len(self._batch.rows)

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """Sequences with a slot: those in rows of the batch, then those whose prompts are being read, each once.

        A sequence is in both `batch.rows` and `prefilling` if an error occurred while its row was added.
        """
        stepping = [sequence for sequence in self._batch.rows if not sequence.ended]
        return tuple(dict.fromkeys((*stepping, *self.prefilling)))

    def enqueue(self, sequences: Sequence[TokenSequence]) -> None:
        """Queue the sequences of one client, all or none of them.

        Raises:
            QueueFullError: Too many sequences wait, as `WaitingQueue.refuse_if_full` defines.
        """
        with self._lock:
            self._queue.refuse_if_full(self._limits, self.running, sequences[0].request.client, len(sequences))
            for sequence in sequences:
                sequence.stats = Stats(accepted_by_depth=[0] * self._batch.depth)
                self._arrivals += 1
                sequence.admission.arrival = self._arrivals
                self._queue.add(sequence)

    def cancel(self, sequences: Sequence[TokenSequence]) -> None:
        """Let `end_cancelled` end sequences, except sequences that have ended or were never queued."""
        with self._lock:
            for sequence in sequences:
                if sequence.ended or sequence.cancelled or not sequence.admission.arrival:
                    continue
                sequence.cancelled = True
                # Those with a slot come first, as they hold blocks that others wait for.
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
        """End cancelled sequences, those with a slot first, and as many as one round has time for."""
        for _ in range(min(len(self._cancelled), MAX_CANCELLATIONS_PER_ROUND)):
            sequence = self._cancelled.popleft()
            if not sequence.ended:
                self.end(sequence, SequenceDelta((), finish="cancelled"))

    def admit(self, *, mixed_prefill: bool) -> None:
        """Give slots and blocks to the next sequences of the queue, as many as there is room for.

        Call this once a round. If there is room for none while none runs, it waits a moment for others to release some.

        Args:
            mixed_prefill: Whether steps read prompts, so that admitting one sequence alone costs no extra forward.
        """
        self._rounds += 1
        if self._blocks is None or self._blocks.have_turn:
            self._admit(mixed_prefill=mixed_prefill)
        if self._blocks is not None:
            # With a running sequence the round must continue: it releases blocks itself when it ends.
            if self.waiting and not self.running:
                self._blocks.wait()
            else:
                self._blocks.end_wait()

    def _admit(self, *, mixed_prefill: bool) -> None:
        limits, free = self._limits, self._limits.max_batch_size - self.running
        # A forward for prompts alone delays all rows, so it is worth waiting until it can admit several sequences.
        if not mixed_prefill and self.running and 0 < free < min(limits.admit_together, self.waiting):
            return
        while True:
            with self._lock:
                sequence = self._queue.first()
                # Whether its client has no slot at all.
                slotless = sequence is not None and not self._queue.running(sequence)
            if sequence is None:
                return
            if self.running >= limits.max_batch_size and not self._free_a_slot(sequence, slotless):
                return
            with self._lock:
                if sequence not in self._queue:
                    continue  # it was cancelled in another thread
                # Started before its blocks are allocated, so that no other thread sees it in both places.
                self._queue.start(sequence)
                self.prefilling[sequence] = None
            # Stop at the first that does not fit: smaller ones after it would keep it waiting for good.
            if not self._allocate(sequence, slotless):
                self._put_back(sequence)
                return

    def _allocate(self, sequence: TokenSequence, slotless: bool) -> bool:
        """Give blocks to a sequence that was given a slot, and return whether there were enough.

        If it could never get enough, it ends with an error. Others may be preempted for it, as for a slot.
        """
        admission = sequence.admission
        earlier_round, admission.round = admission.round, self._rounds
        if self._blocks is None:
            return True
        # Without the guarantee, blocks for the prompt and one token suffice; rows grow as they step.
        positions = sequence.max_length if self._limits.guaranteed_no_evict else sequence.prefill_length + 1
        slots = positions + self._batch.overshoot
        # Each preemption frees blocks, so the allocation is tried again until it fits or none can be preempted.
        while sequence.block_table is None:
            try:
                self._blocks.allocate(sequence, slots)
            except CacheFullError as error:
                # Waiting would never help a sequence larger than the whole cache.
                if not self._blocks.could_hold(sequence, slots):
                    self.end(sequence, SequenceDelta((), finish="error", error=error))
                    return True
                if not self._free_a_slot(sequence, slotless, positions=slots):
                    admission.round = earlier_round
                    return False
        if admission.queued is None:
            admission.queued = time.perf_counter() - admission.arrived_at
        if earlier_round is None:  # reading a preempted sequence again is not charged to its client
            self.charge(sequence.account, sequence.prefill_length - sequence.prefilled)
        return True

    def _free_a_slot(self, sequence: TokenSequence, slotless: bool, positions: int = 0) -> bool:
        """Preempt a sequence in favour of a waiting one, and return whether there was one to preempt.

        One of a higher priority number gives way, however briefly it has had its slot. One of the same number does only
        for a client without any slot of that number: never another client's only one, and none that has had its slot
        for less than `MIN_ROUNDS_IN_PLACE` rounds, so that each advances by some tokens whenever it has one. If all
        these together hold fewer positions than the sequence needs, none is preempted.

        Args:
            sequence: The sequence that waits.
            slotless: Whether its client had no slot of its priority before.
            positions: Positions that it needs.
        """
        if self._blocks is None or self._limits.guaranteed_no_evict:
            return False
        candidates = [
            (other, other.block_table)
            for other in self.sequences
            if other.block_table is not None
            and (
                other.request.priority > sequence.request.priority
                or (
                    slotless
                    and other.request.priority == sequence.request.priority
                    and self._rounds - (other.admission.round or 0) >= MIN_ROUNDS_IN_PLACE
                    and self._queue.running(other) > 1
                )
            )
        ]
        # Preempting in vain would cost the others a prefill and give the waiting one nothing.
        blocks = self._blocks.free + sum(len(table.blocks) for _, table in candidates)
        if not candidates or blocks * BLOCK_SIZE < positions:
            return False
        # Chosen before `settle`, which may end sequences; the caller tries again if the choice has ended.
        chosen = self._next_to_preempt([other for other, _ in candidates])
        # Its blocks may be allocated again only once the tokens in flight are known.
        self._settle()
        # `settle` read the tokens in flight, which may have ended it.
        if not chosen.ended:
            self._preempt(chosen)
        return True

    def _next_to_preempt(self, sequences: Sequence[TokenSequence]) -> TokenSequence:
        """Return the sequence of the highest priority number; among equals the newest of the client with most slots.

        It is never the oldest of the lowest number unless that is the only one, so at least one always advances.
        """
        return max(sequences, key=lambda x: (x.request.priority, self._queue.running(x), x.admission.arrival))

    def put_all_back(self) -> None:
        """Let every sequence with a slot wait again, in the order of their arrival."""
        # Each goes to the front of its client's queue, so the newest goes first.
        for sequence in sorted(self.sequences, key=lambda sequence: sequence.admission.arrival, reverse=True):
            self._preempt(sequence)

    @property
    def has_cancelled(self) -> bool:
        """Return whether `end_cancelled` has sequences to end."""
        return bool(self._cancelled)

    def _preempt(self, sequence: TokenSequence) -> None:
        self.preempted += 1
        self._put_back(sequence)

    def _put_back(self, sequence: TokenSequence) -> None:
        """Let a sequence wait again. Its prefix may still be cached when its turn comes, or is recomputed."""
        self._take_back([sequence], keep=True)
        with self._lock:
            self._queue.put_back(sequence)

    def grow(self) -> list[TokenSequence]:
        """Allocate blocks for each row's next step, and preempt the least urgent sequences if there are too few.

        Returns the sequences that received blocks; some of them may have been preempted since.
        """
        assert self._blocks is not None, "a dense cache grows as its sequences do"
        if self._limits.guaranteed_no_evict:  # each was given its blocks when it was admitted
            return []
        grown = []
        for sequence in tuple(self._batch.rows):
            while sequence.block_table is not None:  # until it ends or is preempted itself
                # Each step in flight may have accepted a whole path that the host has not read yet.
                longest = len(sequence.tokens) + sequence.launched * (self._batch.depth + 1)
                slots = min(longest, sequence.max_length) + self._batch.overshoot
                try:
                    if self._blocks.grow(sequence, slots):
                        grown.append(sequence)
                    break
                except CacheFullError as error:
                    # Reading the tokens in flight is cheaper than preempting: a sequence that has ended releases its
                    # blocks.
                    if self._settle():
                        continue  # a sequence may have ended
                    if self._blocks.could_hold(sequence, slots):
                        self._preempt(self._next_to_preempt(self.sequences))
                    else:
                        self.end(sequence, SequenceDelta((), finish="error", error=error))
        return grown

    def charge(self, account: Account, tokens: int) -> None:
        """Add tokens that were read or drawn for sequences with slots to their account."""
        with self._lock:
            self._queue.charge(account, tokens)

    def end(self, sequence: TokenSequence, delta: SequenceDelta, keep: bool = True) -> None:
        """Release the slot and blocks of a sequence, and report its last delta; see `end_together`."""
        self.end_together([(sequence, delta)], keep)

    def end_together(self, ended: Sequence[tuple[TokenSequence, SequenceDelta]], keep: bool = True) -> None:
        """Release the slots and blocks of sequences, and report their last deltas.

        Later sequences may reuse their keys and values if `keep` is set, which must not be after an error.
        """
        held = {sequence for sequence, _ in ended if sequence.row is not None or sequence in self.prefilling}
        # Blocks may be published already, so they are withdrawn before they are released.
        if self._blocks is not None and not keep:
            for sequence, _ in ended:
                self._blocks.withdraw(sequence)
        self._take_back([sequence for sequence, _ in ended], keep, bulk=self._limits.bulk)
        for sequence, delta in ended:
            with self._lock:
                if sequence in held:
                    self._queue.end(sequence)
                elif sequence in self._queue:
                    self._queue.remove(sequence)
                sequence.ended = True
            # After all is released: the sink may submit a sequence at once.
            sequence.sink(sequence, delta)

    def abandon(self) -> None:
        """Release the slots and blocks of sequences, without reporting deltas."""
        self._take_back(self.sequences, keep=False)
        self._queue.clear()
        if self._blocks is not None:
            self._blocks.end_wait()

    def _take_back(self, sequences: Sequence[TokenSequence], keep: bool, *, bulk: bool = False) -> None:
        """Take back the blocks and the rows of sequences, whose keys and values may be reused if `keep` is set."""
        for sequence in sequences:
            if self._blocks is not None:
                # Before the row is removed: how many tokens are cached depends on whether the sequence has a row.
                self._blocks.release(sequence, keep)
            self.prefilling.pop(sequence, None)
            sequence.prefilled, sequence.unread_from = 0, None
            if sequence.draft is not None:
                sequence.draft.prefilled = 0
        if stepping := [sequence for sequence in sequences if sequence.row is not None]:
            self._batch.remove(stepping, bulk=bulk)
