"""Continuous batching: which sequences wait, whose prompts are read, and which rows step.

A round admits the sequences that there is room for, reads a chunk of the prompts that are not in the cache yet, and
then makes one step of all rows. So a long prompt delays running sequences by a chunk, never by its whole length, and a
sequence that ends makes room in the next round. The tokens of a sequence depend on none of that: draws are keyed by
seed and position.

On a GPU, a step's forward reads chunks of prompts beside the trees of the rows, since a step of few tokens takes as
long as one of some more. Prompts have a forward of their own where they outnumber the rows that must wait for it.

Which sequence is admitted next is decided by client (`waiting_queue`), how much of the prompts a round reads by the
time that earlier chunks took (`prefill_budget`). Where every place is taken, a client without any is given the place of
another client's newest sequence, which goes on later with the same tokens. No round looks at every waiting sequence.

On a GPU the host is one step behind: a step is launched before the tokens of the one before it are read, so that the
GPU never waits for Python. A sequence that turns out to have ended takes part in one more step, whose tokens nobody
reads. What is launched later runs later, so its row and its blocks can be given away at once.
"""

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from redrafter.cache.to_device import to_device
from redrafter.errors import CacheFullError, UnsupportedError
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.scheduler.cuda_graphs import CUDAGraphRunner, PendingReport, bucket
from redrafter.scheduler.launched import LaunchedPrefill, LaunchedStep, Timer
from redrafter.scheduler.limits import Limits, check_sequences
from redrafter.scheduler.models import Models
from redrafter.scheduler.prefill import PrefilledRows, Prefiller
from redrafter.scheduler.prefill_budget import Chunk, padded_tokens
from redrafter.scheduler.row_caches import PagedRows
from redrafter.scheduler.running_batch import RunningBatch
from redrafter.scheduler.sampling_tensors import SamplingTensors
from redrafter.scheduler.sequence import NewTokens, SequenceDelta, TokenSequence
from redrafter.scheduler.sequence_blocks import SequenceBlocks
from redrafter.scheduler.stats import Stats
from redrafter.scheduler.waiting_queue import WaitingQueue
from redrafter.step import StepOutput, draw_first_tokens

__all__ = ["Scheduler"]

_LOG = logging.getLogger(__name__)

MIN_ROUNDS_IN_PLACE = 16  # rounds for which a sequence keeps its place, however many clients have none
MAX_CANCELLATIONS_PER_ROUND = 512  # reporting each to its sink takes some microseconds


class Scheduler:
    """Decodes sequences of any kind side by side, round by round.

    `submit` and `cancel` may be called from any thread, all else from the one that runs the rounds. Nobody else may
    decode on the same graphs.

    Attributes:
        engine: Target and proposers.
        limits: What may run and wait at once.
        batch: The rows that step.
        prefiller: Reads the prompts of admitted sequences.
        longest: Most tokens of a sequence, prompt included.
        overlap: Whether a step is launched before the one before it is read. It gains nothing where a device computes
            at once what is launched, as a CPU does.
        reads_beside: Whether steps read chunks of prompts too. It gains nothing where each token of a forward takes its
            time, as on a CPU.
        on_failure: Called with an exception that ended all running sequences, and how many there were.
        preempted: Number of sequences put back into the queue so far.
    """

    def __init__(
        self,
        engine: Models,
        graphs: CUDAGraphRunner | None,
        limits: Limits,
        speculate: bool = True,
        batch: RunningBatch | None = None,
    ):
        """Make a scheduler without sequences.

        Args:
            engine: Target and proposers.
            graphs: Captured steps and KV cache, of the engine's target and of its draft model, if it has one; None for
                the dense cache that `batch` has.
            limits: What may run and wait at once.
            speculate: Whether any row verifies drafts.
            batch: An empty running batch; None for one of sequences of any kind.

        Raises:
            UnsupportedError: Sequences of any kind need a paged cache, and a model cannot run on one, or the two are on
                different devices.
        """
        self.engine, self._graphs, self.limits = engine, graphs, limits
        draft_model = engine.draft_model if speculate else None
        if batch is None:
            assert graphs is not None, "sequences of any kind are on a paged cache"
            _check_paged(engine)
            rows = bucket(limits.max_batch_size)
            sampling = SamplingTensors(rows, engine.target.vocab_size, engine.target.device)
            caches = PagedRows(graphs, draft_model is not None)
            batch = RunningBatch(engine.target, sampling, rows, caches, graphs)
        self.batch = batch
        batch.draft_with(engine, limits.max_batch_size, speculate=speculate)
        self.prefiller = Prefiller(engine.target, draft_model, limits)
        self._blocks = None if graphs is None else SequenceBlocks(graphs, draft_model is not None, limits.reuse)
        self.longest = self._bound()
        self.overlap = graphs is not None and engine.target.device.type == "cuda"
        self.reads_beside = self.overlap and self.prefiller.can_read_beside
        self.on_failure: Callable[[Exception, int], object] = self._log_failure
        self._launched: deque[LaunchedStep | LaunchedPrefill] = deque()  # not read yet, in their order
        self._lock = threading.Lock()  # of the queue and of the cancelled sequences
        self._queue = WaitingQueue()
        self._cancelled: deque[TokenSequence] = deque()  # not ended yet; those with a place come first
        self._prefilling: dict[TokenSequence, None] = {}  # in the order of their admission
        self._arrivals = self._rounds = self.preempted = 0

    def _bound(self) -> int:
        """Return the most tokens of a sequence that can be served."""
        bounds = [self.limits.max_seq_len, self.engine.target.fixed_rope_context]
        if self._graphs is not None:
            bounds.append((self._graphs.store.num_blocks - 1) * BLOCK_SIZE - self.batch.overshoot)
        return min((bound for bound in bounds if bound is not None), default=sys.maxsize)

    def _log_failure(self, error: Exception, count: int) -> None:
        _LOG.error("a round failed: %d requests are given up", count, exc_info=error)

    @property
    def graphs(self) -> CUDAGraphRunner:
        """The captured steps and the paged cache; an `AssertionError` on a dense one."""
        assert self._graphs is not None
        return self._graphs

    @property
    def idle(self) -> bool:
        """Whether a round would have nothing to do."""
        return not (self._queue or self._cancelled or self._prefilling or self.batch.sequences or self._launched)

    @property
    def waiting(self) -> int:
        """Number of sequences that wait for a place."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Number of sequences that hold a place: those that step and those whose prompts are being read."""
        return len(self._prefilling) + len(self.batch.sequences)

    @property
    def clients(self) -> int:
        """Number of clients with a sequence that waits or holds a place."""
        return self._queue.clients

    def submit(self, *sequences: TokenSequence) -> None:
        """Queue the sequences of one client, all or none of them.

        Raises:
            QueueFullError: Too many sequences wait, see `Limits.refuse_if_full`.
            ArgumentError: One of them can never be served.
        """
        if not sequences:
            return
        check_sequences(sequences, self.longest, self.engine.target.vocab_size)
        for sequence in sequences:
            sequence.max_new_tokens = min(sequence.max_new_tokens, self.longest - len(sequence.prompt))
        self.enqueue(*sequences)

    def enqueue(self, *sequences: TokenSequence) -> None:
        """Queue the sequences of one client as they are, all or none of them.

        Raises:
            QueueFullError: Too many sequences wait, see `Limits.refuse_if_full`.
        """
        with self._lock:
            self.limits.refuse_if_full(self._queue, self.running, sequences[0].client, len(sequences))
            for sequence in sequences:
                sequence.stats = Stats(accepted_by_depth=[0] * self.batch.depth)
                self._arrivals += 1
                sequence.arrival = self._arrivals
                self._queue.add(sequence)

    def cancel(self, *sequences: TokenSequence) -> None:
        """End sequences before their next step, except those that have ended or were never submitted."""
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
        """End every sequence that waits or runs before its next step. For the thread that runs the rounds."""
        with self._lock:
            waiting = self._queue.clear()
            for sequence in waiting:
                sequence.cancelled = True
            self._cancelled.extend(waiting)
        self.cancel(*self._placed)

    def abandon(self) -> None:
        """Take back what sequences hold, without reporting anything to them. For the thread that runs the rounds."""
        self._launched.clear()
        for sequence in self._placed:
            self._vacate(sequence, keep=False)
        self._queue.clear()

    def round(self) -> None:
        """Admit sequences, read a chunk of their prompts, and step all rows."""
        self.read()
        self.step()

    @torch.inference_mode()
    def read(self) -> None:
        """Run the first half of a round, which draws the first token of every prompt that is complete."""
        self._rounds += 1
        self._run(self._end_cancelled, self._admit, self._prefill)

    @torch.inference_mode()
    def step(self) -> None:
        """Run the second half of a round: one step of all rows."""
        self._run(self._grow_block_tables, self._step)

    def _run(self, *phases: Callable[[], None]) -> None:
        """Run phases of a round in their order. If one raises an exception, end all running sequences with that error.

        Running are the sequences in the batch and those whose prompts are being read; any of them may be damaged. The
        exception goes to `on_failure` and is not raised again, so that later rounds serve the sequences that wait.

        Args:
            phases: Methods that make up a half of a round.
        """
        try:
            for phase in phases:
                phase()
        except Exception as error:
            self._launched.clear()
            placed = self._placed
            for sequence in placed:
                self._end(sequence, SequenceDelta((), finish="error", error=error), keep=False)
            self.on_failure(error, len(placed))

    @property
    def _placed(self) -> tuple[TokenSequence, ...]:
        """Running sequences: those in rows of the batch, then those whose prompts are being read, each once.

        A sequence is in both `batch.sequences` and `_prefilling` if an error occurred while its row was added.
        """
        return tuple(dict.fromkeys((*self.batch.sequences, *self._prefilling)))

    def _end_cancelled(self) -> None:
        for _ in range(min(len(self._cancelled), MAX_CANCELLATIONS_PER_ROUND)):
            sequence = self._cancelled.popleft()
            if not sequence.ended:
                self._end(sequence, SequenceDelta((), finish="cancelled"))

    def _admit(self) -> None:
        """Give places and blocks to the next sequences of the queue, as many as there is room for."""
        free = self.limits.max_batch_size - self.running
        if not self.reads_beside and self.running and 0 < free < min(self.limits.admit_together, self.waiting):
            return
        while True:
            with self._lock:
                sequence = self._queue.first()
                placeless = sequence is not None and not self._queue.running(sequence.client)
            if sequence is None:
                return
            if self.running >= self.limits.max_batch_size and not (placeless and self._free_a_place()):
                return
            with self._lock:
                if sequence not in self._queue:
                    continue  # it was cancelled meanwhile
                self._queue.start(sequence)
                self._prefilling[sequence] = None
            if not self._allocate(sequence, placeless):
                with self._lock:
                    del self._prefilling[sequence]
                    self._queue.put_back(sequence)
                return

    def _allocate(self, sequence: TokenSequence, placeless: bool) -> bool:
        """Give blocks to a sequence that was given a place, and return whether there were enough.

        If it could never get enough, it ends with an error.

        Args:
            sequence: An admitted sequence.
            placeless: Whether its client has no other place, so that another client's sequence may be preempted.
        """
        earlier_round, sequence.admitted_round = sequence.admitted_round, self._rounds
        if self._blocks is None:
            return True
        positions = sequence.max_length if self.limits.guaranteed_no_evict else sequence.prefill_length + 1
        slots = positions + self.batch.overshoot
        while sequence.block_table is None:
            try:
                self._blocks.allocate(sequence, slots)
            except CacheFullError as error:
                if self.running == 1 or not self.batch.sampling.movable:  # it would not fit into an empty cache either
                    self._end(sequence, SequenceDelta((), finish="error", error=error))
                    return True
                if not (placeless and self._free_a_place(slots)):
                    sequence.admitted_round = earlier_round
                    return False
        if earlier_round is None:  # reading a preempted sequence again is not charged to its client
            self._charge(sequence, sequence.prefill_length - sequence.prefilled)
        return True

    def _free_a_place(self, slots: int = 0) -> bool:
        """Preempt a sequence for a client without any place, and return whether there was one to preempt.

        It is the newest sequence of the client that has most places, never a client's only one, and none that has had
        its place for less than `MIN_ROUNDS_IN_PLACE` rounds: so each advances by some tokens whenever it has a place.

        Args:
            slots: Positions that the client's sequence needs. If all such sequences together hold less, none is
                preempted.
        """
        if self.limits.guaranteed_no_evict or self._blocks is None:
            return False
        candidates = [
            (sequence, sequence.block_table)
            for sequence in self._placed
            if sequence.block_table is not None
            and self._rounds - (sequence.admitted_round or 0) >= MIN_ROUNDS_IN_PLACE
            and self._queue.running(sequence.client) > 1
        ]
        blocks = self._blocks.free + sum(len(table.blocks) for _, table in candidates)
        if not candidates or blocks * BLOCK_SIZE < slots:
            return False
        chosen = self._newest([sequence for sequence, _ in candidates])
        self.settle()
        if not chosen.ended:
            self._preempt(chosen)
        return True

    def _newest(self, sequences: Sequence[TokenSequence]) -> TokenSequence:
        """Return the newest sequence of the client with most places, never the oldest of all unless it is alone."""
        return max(sequences, key=lambda sequence: (self._queue.running(sequence.client), sequence.arrival))

    def _preempt(self, sequence: TokenSequence) -> None:
        """Put a sequence back into the queue. Its prefix may be in the cache when its turn comes, or is read anew."""
        self.preempted += 1
        self._vacate(sequence, keep=True)
        with self._lock:
            self._queue.put_back(sequence)

    def _prefill(self) -> None:
        """Launch forwards that read on in the prompts, and let those that are complete take part in the next step."""
        beside = self._read_beside_rows()
        alone = [sequence for sequence in self._prefilling if sequence not in beside]
        if not alone:
            return
        for chunks in self.prefiller.choose(alone, self._step_tokens):
            timer = Timer(self.engine.target.device)
            rows = self.prefiller.forward(chunks, self.batch.caches)
            self._publish(rows)
            first = self._start_decoding(rows)
            timer.stop()
            self._launch(LaunchedPrefill(first, padded_tokens(chunks, self.prefiller.padded), timer))

    def _publish(self, rows: PrefilledRows) -> None:
        """Let later sequences find the prompts that are in the cache."""
        if self._blocks is not None:
            for sequence in rows.sequences:
                self._blocks.publish(sequence, sequence.prefill_length)

    @property
    def _step_tokens(self) -> int:
        """Tokens of the trees of the next step."""
        return len(self.batch.rows) * self.batch.nodes

    def _read_beside_rows(self) -> list[TokenSequence]:
        """Return the sequences whose prompts are read in the forwards of steps."""
        if not self.reads_beside or len(self._prefilling) > len(self.batch.sequences):
            return []
        # A prompt that is scored needs the logits of all its tokens.
        return [sequence for sequence in self._prefilling if not sequence.needs_scores]

    def _start_decoding(self, rows: PrefilledRows) -> LaunchedStep | None:
        """Draw the first tokens of prompts that are complete, and add their rows to the running batch.

        A preempted sequence has its pending token already, and where no token is to follow, none is drawn.

        Returns:
            The draws; None where there are none.
        """
        for sequence in rows.sequences:
            if not sequence.max_new_tokens:
                self._end(sequence, SequenceDelta((), finish="length"))
        rows = rows.at([row for row, sequence in enumerate(rows.sequences) if not sequence.ended])
        pending = rows.lengths.clone()  # [B]
        new = [row for row, sequence in enumerate(rows.sequences) if not sequence.written]
        if len(new) < len(rows.sequences):
            pending = to_device([sequence.tokens[-1] for sequence in rows.sequences], pending.device, pending.dtype)
        first = None
        if new:
            drawn = rows.at(new)
            output = self._draw_first_tokens(drawn)
            first = LaunchedStep.of(drawn.sequences, output, PendingReport(output.pack_for_host()))
            pending[to_device(new, pending.device, torch.long)] = output.tokens[:, 0]
        self.batch.add(rows, pending)
        for sequence in rows.sequences:
            del self._prefilling[sequence]
        return first

    def _draw_first_tokens(self, rows: PrefilledRows) -> StepOutput:
        sampler, window = self.batch.sampling.sampler_of(rows.sequences), rows.caches.target.window
        return draw_first_tokens(rows.tokens, rows.lengths, rows.logits, rows.hidden, window, sampler)[1]

    def _grow_block_tables(self) -> None:
        """Give each row blocks for its next step, and preempt the newest sequences where there are too few."""
        if self._blocks is None:
            return
        grown = []
        for sequence in tuple(self.batch.sequences):
            while sequence.block_table is not None:  # until it ends or is preempted itself
                longest = len(sequence.tokens) + sequence.launched * (self.batch.depth + 1)
                slots = min(longest, sequence.max_length) + self.batch.overshoot
                try:
                    if self._blocks.grow(sequence, slots):
                        grown.append(sequence)
                    break
                except CacheFullError as error:
                    if self._launched:
                        self.settle()  # a sequence may have ended
                    elif self.running == 1:
                        self._end(sequence, SequenceDelta((), finish="error", error=error))
                    else:
                        self._preempt(self._newest(self._placed))
        self.batch.update_block_tables(grown)

    def _step(self) -> None:
        """Launch a step of all rows, unless what is launched already ends them all."""
        sequences = self.batch.sequences
        # The host's processors must know the texts; and each forward that was launched adds a token at least.
        if self.batch.asks_host or all(s.written + s.launched >= s.max_new_tokens for s in sequences):
            self.settle()
        older = len(self._launched)
        if self.batch.sequences:
            self._launch_step()
        # The device goes on with this step meanwhile.
        for _ in range(min(older, len(self._launched))):
            self._finish(self._launched.popleft())

    def _launch_step(self) -> None:
        """Launch a step of all rows, which reads chunks of prompts beside them."""
        chunks = self.prefiller.choose_beside(self._read_beside_rows(), self._step_tokens)
        with nullcontext() if self._graphs is None else self._graphs.lock:
            step, output = self.batch.step(chunks)
            self._launch(step)
            if chunks:
                self._finish_chunks(chunks, output)

    def _finish_chunks(self, chunks: Sequence[Chunk], output: StepOutput) -> None:
        """Let prompts that a step has read to their ends take part in the next one."""
        assert output.chunk_ends is not None
        caches = self.batch.caches.of_prompts([sequence for sequence, _ in chunks])
        read = self.prefiller.finish_beside(chunks, output.chunk_ends, caches)
        if read.sequences:
            self._publish(read)
            if first := self._start_decoding(read):
                self._launch(first)

    def _launch(self, forward: LaunchedStep | LaunchedPrefill) -> None:
        """Take note of a forward that was launched. Where nothing overlaps, it is finished at once."""
        self._launched.append(forward)
        drawing = forward.first if isinstance(forward, LaunchedPrefill) else forward
        for sequence in () if drawing is None else drawing.sequences:
            sequence.launched += 1
        if not self.overlap:
            self.settle()

    def settle(self) -> None:
        """Wait for all forwards that were launched, and report their tokens. For the thread that runs the rounds."""
        while self._launched:
            self._finish(self._launched.popleft())

    def _finish(self, forward: LaunchedStep | LaunchedPrefill) -> None:
        """Wait for a forward, and report its tokens to the sequences that have not ended meanwhile."""
        if isinstance(forward, LaunchedPrefill):
            if forward.first is not None:
                self._report(forward.first)
            self.prefiller.pace.measure(forward.size, forward.timer.seconds)
        else:
            self._report(forward)

    def _report(self, step: LaunchedStep) -> None:
        rows = tokens = 0  # of rows that took drafts
        for sequence, drawn in step.read():
            sequence.launched -= 1
            if sequence.ended:
                continue
            if step.levels and sequence.params.speculate:
                rows, tokens = rows + 1, tokens + len(drawn.tokens)
                if self.batch.draft_lengths is not None:
                    self.batch.draft_lengths.observe(sequence.index, len(drawn.tokens) - 1, step.levels)
            self._append(sequence, drawn)
        if rows and self.batch.draft_gain is not None:
            self.batch.draft_gain.observe(rows, tokens)

    def _append(self, sequence: TokenSequence, drawn: NewTokens) -> None:
        """Append tokens as `TokenSequence.append` does, and report them; a sequence that ends gives its place back."""
        delta = sequence.append(drawn)
        self._charge(sequence, len(delta.tokens))
        if delta.finish is None:
            sequence.sink(sequence, delta)
        else:
            self._end(sequence, delta)

    def _charge(self, sequence: TokenSequence, tokens: int) -> None:
        with self._lock:
            self._queue.charge(sequence, tokens)

    def _end(self, sequence: TokenSequence, delta: SequenceDelta, keep: bool = True) -> None:
        """Take back what a sequence holds, and report its last delta. keep: whether its prefix may be reused."""
        placed = sequence.row is not None or sequence in self._prefilling
        self._vacate(sequence, keep)
        with self._lock:
            if placed:
                self._queue.end(sequence)
            elif sequence in self._queue:
                self._queue.remove(sequence)
            sequence.ended = True
        sequence.sink(sequence, delta)

    def _vacate(self, sequence: TokenSequence, keep: bool) -> None:
        """Take back the blocks and the row of a sequence. keep: whether its keys and values may be reused."""
        if self._blocks is not None:
            self._blocks.release(sequence, keep)
        if sequence.row is not None:
            self.batch.remove(sequence)
        self._prefilling.pop(sequence, None)
        sequence.prefilled = 0


def _check_paged(engine: Models) -> None:
    """Raise `UnsupportedError` if the models cannot run on a paged cache of one device."""
    target, draft_model = engine.target, engine.draft_model
    if draft_model is not None and draft_model.device != target.device:
        raise UnsupportedError(
            f"the draft model is on {draft_model.device} and the target on {target.device}; a server needs both on one "
            "device"
        )
    reason = target.paged.reason or (draft_model and draft_model.paged.reason)
    if reason:
        raise UnsupportedError(f"{target.name} cannot be served on a paged cache: {reason}")
