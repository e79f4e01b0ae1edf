"""Continuous batching: which sequences wait, whose prompts are read, and which rows step.

A round admits the sequences that there is room for, reads a chunk of the prompts that are not in the cache yet, and
then makes one step of all rows. So a long prompt delays running sequences by a chunk, never by its whole length, and a
sequence that ends makes room in the next round. The tokens of a sequence depend on none of that: draws are keyed by
seed and position.

On a GPU, a step's forward reads chunks of prompts together with the trees of the rows, since a step of few tokens takes
as long as one of some more. Prompts have a forward of their own where they outnumber the rows that must wait for it.

Which sequence is admitted next is decided by client (`waiting_queue`), which one gives way where there are too few
slots or blocks in `running_set`, and how much of the prompts a round reads by the time that earlier chunks took
(`prefill`). No round looks at every waiting sequence of a client.

On a GPU the host lags by one step: a step is launched before the tokens of the one before it are read, so that the
GPU never waits for Python. A sequence that turns out to have ended takes part in one more step, whose tokens are not
read. Later launches run later, so its row and its blocks can be reused at once.
"""

import logging
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from math import isnan
from weakref import proxy

import torch

from redrafter.drafting.policy import DraftedStep
from redrafter.drafting.vocabulary_map import DraftText
from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.scheduler.captured_step import LaunchedForward, LaunchedStep, Timer, bucket
from redrafter.scheduler.engine_change import EngineChange, Models
from redrafter.scheduler.paged_memory import PagedMemory
from redrafter.scheduler.prefill import Chunk, PrefilledRows, Prefiller, padded_tokens
from redrafter.scheduler.request import RequestBounds, check_requests
from redrafter.scheduler.row_caches import PagedRows
from redrafter.scheduler.running_batch import RunningBatch
from redrafter.scheduler.running_set import RunningSet
from redrafter.scheduler.sampling_tensors import SamplingTensors
from redrafter.scheduler.sequence import Account, DraftSequence, SequenceDelta, TokenSequence, not_finite
from redrafter.scheduler.sequence_blocks import SequenceBlocks
from redrafter.scheduler.waiting_queue import Limits

_LOG = logging.getLogger(__name__)


class Scheduler:
    """Decodes sequences of any kind in one batch, round by round.

    `submit` and `cancel` may be called from any thread, all else only from the thread that runs the rounds. Schedulers
    of other threads may share the memory, but not the batch.

    Attributes:
        engine: Target and proposers.
        limits: Limits of the sequences that run and wait.
        batch: The rows that step.
        running_set: The sequences from their arrival to their end, with counts for operators.
        prefiller: Reads the prompts of admitted sequences.
        longest: Most tokens of a sequence, prompt included.
        overlap: Whether a step is launched before the previous one is read. It gains nothing on a device that computes
            synchronously, as a CPU does.
        mixed_prefill: Whether steps read chunks of prompts too. It gains nothing where the time of a forward grows with
            each token, as on a CPU.
        asleep: Whether the engine sleeps: nothing is computed, and sequences wait.
        later: Work for the thread that runs the rounds, piece by piece while there are no sequences.
        on_failure: Called with an exception that ended sequences, and their number.
    """

    def __init__(
        self,
        engine: Models,
        memory: PagedMemory | None,
        limits: Limits,
        speculate: bool = True,
        batch: RunningBatch | None = None,
    ):
        """Make a scheduler without sequences.

        Args:
            engine: Target and proposers.
            memory: The paged memory of the engine's target and of its draft model, if it has one; None for a dense
                cache, which `batch` has.
            limits: Limits of the sequences that run and wait.
            speculate: Whether any row verifies drafts.
            batch: An empty running batch; None for one of sequences of any kind.

        Raises:
            UnsupportedError: Sequences of any kind need a paged cache, and a model cannot run on one.
        """
        self.engine, self._memory, self.limits = engine, memory, limits
        draft_model = engine.draft_model if speculate else None
        self._draft_vocabulary = engine.draft_vocabulary if speculate else None
        if batch is None:
            assert memory is not None, "sequences of any kind are on a paged cache"
            check_paged(engine)
            rows = bucket(limits.max_batch_size)
            sampling = SamplingTensors(rows, engine.target.vocab_size, engine.target.device, ranks=engine.target.ranks)
            caches = PagedRows(memory, draft_model is not None, self._draft_vocabulary)
            batch = RunningBatch(engine.target, sampling, rows, caches, memory=memory)
        self.batch = batch
        batch.draft_with(engine, limits.max_batch_size, speculate=speculate)
        self.prefiller = Prefiller(engine.target, draft_model, limits, same_ids=self._draft_vocabulary is None)
        self._blocks = None if memory is None else SequenceBlocks(memory, draft_model is not None, limits.reuse)
        weak = proxy(self)  # a cycle would keep an engine that nobody holds, and its cache, until garbage is collected
        self.running_set = RunningSet(batch, self._blocks, limits, lambda: weak.settle())
        self.longest = self._bound()
        self.overlap = memory is not None and engine.target.device.type == "cuda"
        self.mixed_prefill = self.overlap and self.prefiller.can_mix
        self.asleep = False
        self._speculate = speculate
        self.later = deque[Callable[[], object]]()
        self.on_failure: Callable[[Exception, int], object] = self._log_failure
        self._launched: deque[LaunchedForward] = deque()  # not read yet, in their order

    def _bound(self) -> int:
        """Return the most tokens of a sequence that can be served."""
        bounds = [self.limits.max_seq_len, self.engine.target.context]
        if self._memory is not None:
            # Block 0 is never allocated, and a last step writes past the sequence's end.
            bounds.append((self._memory.store.num_blocks - 1) * BLOCK_SIZE - self.batch.overshoot)
        return min((bound for bound in bounds if bound is not None), default=sys.maxsize)

    @staticmethod
    def _log_failure(error: Exception, count: int) -> None:
        _LOG.error("a round failed: %d sequences are given up", count, exc_info=error)

    @property
    def memory(self) -> PagedMemory:
        """The paged memory; an `AssertionError` on a dense cache."""
        assert self._memory is not None
        return self._memory

    @property
    def bounds(self) -> RequestBounds:
        """Return the limits of requests that the engine can serve."""
        return RequestBounds(self.engine.target.vocab_size, self.longest, self.limits.max_input_len, self.batch.depth)

    @property
    def idle(self) -> bool:
        """Return whether a round would have nothing to do."""
        if self.asleep:
            return not self.running_set.has_cancelled
        return self.running_set.idle and not self._launched

    def submit(self, *sequences: TokenSequence) -> None:
        """Queue the sequences of one client, all or none of them.

        Raises:
            QueueFullError: Too many sequences wait, as `WaitingQueue.refuse_if_full` defines.
            ArgumentError: One of them can never be served.
        """
        check_requests([sequence.request for sequence in sequences], self.bounds)
        if self._draft_vocabulary is not None:
            for sequence in sequences:
                sequence.draft = DraftSequence(DraftText(self._draft_vocabulary))
        if sequences:
            self.running_set.enqueue(sequences)

    def cancel(self, *sequences: TokenSequence) -> None:
        """End sequences before their next step, except sequences that have ended or were never submitted."""
        self.running_set.cancel(sequences)

    def cancel_all(self) -> None:
        """End every sequence that waits or runs before its next step. For the thread that runs the rounds."""
        self.running_set.cancel_all()

    def abandon(self) -> None:
        """Release the slots and blocks of sequences without reporting deltas. For the thread that runs the rounds."""
        self._launched.clear()
        self.running_set.abandon()

    def change(self, change: EngineChange) -> None:
        """Change the engine between two rounds. For the thread that runs the rounds.

        Sequences that hold slots are put back into the queue. They continue with their tokens, whose keys and
        values are recomputed where the change makes them invalid; while the engine sleeps, they wait.

        Raises:
            ReDrafterError: The change cannot be made now; the engine is unchanged, but sequences were preempted.
        """
        # Tokens in flight were drawn with the old weights, and must be appended before these change.
        self.settle()
        with torch.inference_mode():  # in which the rows' buffers were made
            self.running_set.put_all_back()
        change.apply()
        self.asleep = self.engine.target.asleep
        self._follow_changes()

    def _follow_changes(self) -> None:
        """Drop what the models have computed before they were changed; running sequences are read again."""
        if self.batch.follows:
            return
        self.settle()
        with torch.inference_mode():
            self.running_set.put_all_back()
        self.batch.draft_with(self.engine, self.limits.max_batch_size, speculate=self._speculate)

    def round(self) -> None:
        """Admit sequences, read a chunk of their prompts, and step all rows."""
        self.prefill()
        self.step()

    @torch.inference_mode()
    def prefill(self) -> None:
        """Run the first half of a round, which draws the first token of every prompt that is complete."""
        with self._ending(lambda: self.running_set.sequences):
            self.running_set.end_cancelled()
            if self.asleep:
                return
            if self._memory is not None:  # a dense cache lasts for one call
                self._follow_changes()
            self.running_set.admit(mixed_prefill=self.mixed_prefill)
            # Prompts that the step will read are excluded here, or they would be read twice.
            mixed = self._mixed_sequences()
            alone = [sequence for sequence in self.running_set.prefilling if sequence not in mixed]
            for chunks in self.prefiller.choose(alone, self.batch.step_nodes) if alone else ():
                self._read_chunks(chunks)

    @torch.inference_mode()
    def step(self) -> None:
        """Run the second half of a round: one step of all rows."""
        with self._ending(lambda: [sequence for sequence in self.batch.rows if not sequence.ended]):
            if self.asleep:
                return
            if self._blocks is not None and (grown := self.running_set.grow()):
                self.batch.update_block_tables(grown)
            # Processors on the host need all tokens. Where the step in flight will probably end all rows, the next one
            # would be wasted, and a new prompt would wait for it.
            rows = self.batch.rows
            if self.batch.asks_host or (rows and all(sequence.may_end for sequence in rows)):
                self.settle()
            older = len(self._launched)
            mixed = self._mixed_sequences()
            if self.batch.rows or mixed:
                self._launch_step(mixed)
            # Older forwards are read after the launch, so that the device computes the new step in the meantime.
            for _ in range(min(older, len(self._launched))):
                self._finish(self._launched.popleft())

    @contextmanager
    def _ending(self, sequences: Callable[[], Sequence[TokenSequence]]) -> Iterator[None]:
        """End the sequences that the work in the context may have damaged with its exception; all others continue."""
        try:
            yield
        except Exception as error:
            self._fail(sequences(), error)

    def _fail(self, sequences: Sequence[TokenSequence], error: Exception) -> None:
        """End sequences with an exception, which goes to `on_failure` and is not raised again."""
        for sequence in sequences:
            self.running_set.end(sequence, SequenceDelta((), finish="error", error=error), keep=False)
        if not self.batch.rows:
            self._launched.clear()  # no sequence waits for its draws, and reading them may fail again
        self.on_failure(error, len(sequences))

    def _read_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Launch a forward over prompts only. It writes to nothing but their blocks, so an error ends no others."""
        timer = Timer(self.engine.target.device)
        seeing = chunks[0][0].request.images is not None
        with self._ending(lambda: [sequence for sequence, _ in chunks if not sequence.ended]):
            try:
                rows = self.prefiller.forward(chunks, self.batch.caches, self.batch.read_drafts)
            except (ArgumentError, UnsupportedError) as error:
                if not seeing:
                    raise
                # Wrong images are a mistake of this request, and no failure of the engine.
                self.running_set.end(chunks[0][0], SequenceDelta((), finish="error", error=error), keep=False)
                return
            first = self._start_decoding(rows)
            timer.stop()
            # The time that images take says nothing about other prompts.
            size = padded_tokens(chunks, self.prefiller.padded)
            self._launch(LaunchedForward(first, timer, None if seeing else partial(self.prefiller.pace.measure, size)))

    def _mixed_sequences(self) -> list[TokenSequence]:
        """Return the sequences whose prompts are read in the forwards of steps, which are captured."""
        if not self.mixed_prefill:
            return []
        prefilling, rows = self.running_set.prefilling, len(self.batch.rows)
        # A prompt that is scored needs the logits of all its tokens; one with images, a forward of the model's own.
        texts = [sequence for sequence in prefilling if not sequence.needs_scores and sequence.request.images is None]
        # Where rows are few and prompts long, steps would read these in too many small parts.
        few = len(prefilling) <= rows or self.prefiller.fit_steps(texts, rows, self.batch.step_nodes)
        return texts if few else []

    def _start_decoding(self, rows: PrefilledRows) -> LaunchedStep | None:
        """Let sequences whose prompts are complete take part in the next step, unless no token is to follow.

        Returns the draws of their first tokens; None where there are none.
        """
        for sequence in rows.sequences:
            # Published before the first draw, so that a request with the same prompt can share it at once.
            if self._blocks is not None:
                self._blocks.publish(sequence, sequence.prefill_length)
            # Nothing drawn from such logits is usable, so the sequence ends before its first token.
            if any(isnan(score.logprob) for score in sequence.prompt_scores):
                error = not_finite(len(sequence.request.prompt))
                self.running_set.end(sequence, SequenceDelta((), finish="error", error=error), keep=False)
            elif not sequence.request.max_new_tokens:
                self.running_set.end(sequence, SequenceDelta((), finish="length"))
        rows = rows.at([row for row, sequence in enumerate(rows.sequences) if not sequence.ended])
        first = self.batch.begin(rows)
        for sequence in rows.sequences:
            del self.running_set.prefilling[sequence]
        return first

    def _launch_step(self, mixed: Sequence[TokenSequence]) -> None:
        """Launch a step of all rows, which may be none, whose forward reads chunks of some prompts too."""
        reading, rows = list(mixed), tuple(self.batch.rows)
        lock = nullcontext() if self._memory is None else self._memory.lock
        # Other schedulers share the graphs' memory, so outputs are copied before the lock is released.
        with self._ending(lambda: [s for s in (*rows, *reading) if not s.ended]), lock:
            prompts = self.prefiller.choose_mixed(mixed, len(rows), self.batch.step_nodes)
            # After the choice: only the chosen sequences are affected by an error.
            reading = [sequence for sequence, _ in prompts.chunks]
            step, output = self.batch.step(prompts)
            self._launch(step)
            if not reading:
                return
            # Prompts that the step has read to their ends take part in the next one.
            assert output.chunk_ends is not None
            read = self.prefiller.finish_mixed(prompts.chunks, output.chunk_ends, self.batch.caches)
            if read is not None and (first := self._start_decoding(read)):
                self._launch(LaunchedForward(first))

    def _launch(self, forward: LaunchedForward) -> None:
        """Take note of a forward that was launched. Where nothing overlaps, it is finished at once."""
        self._launched.append(forward)
        for sequence in () if forward.draws is None else forward.draws.sequences:
            sequence.launched += 1
        if not self.overlap:
            self.settle()

    @torch.inference_mode()
    def settle(self) -> bool:
        """Wait for all forwards that were launched, and report their tokens. For the thread that runs the rounds.

        Returns:
            Whether any was launched.
        """
        any_launched = bool(self._launched)
        while self._launched:
            self._finish(self._launched.popleft())
        return any_launched

    def _finish(self, forward: LaunchedForward) -> None:
        """Wait for a forward, use its time, and report its tokens."""
        if forward.timer is not None and forward.use_seconds is not None:
            # Rank 0's time, or ranks would draft other trees and read other chunks.
            forward.use_seconds(self.engine.target.ranks.from_first(forward.timer.seconds))
        if forward.draws is not None:
            self._report(forward.draws)

    def _report(self, step: LaunchedStep) -> None:
        """Wait for the tokens of a step, and report them to the sequences that have not ended meanwhile."""
        copied = 0
        Deltas = list[tuple[TokenSequence, SequenceDelta]]
        running, ended, failed = Deltas(), Deltas(), Deltas()
        charged = Counter[Account]()
        for sequence, drawn in step.read_deltas():
            sequence.launched -= 1
            # A sequence that ended after the launch still took part; its tokens are dropped.
            if sequence.ended:
                continue
            copied += drawn.copied
            try:
                delta = sequence.append(drawn)
            except Exception as error:  # raised by a criterion of this sequence
                self._fail([sequence], error)
                continue
            charged[sequence.account] += len(delta.tokens)
            into = running if delta.finish is None else ended if delta.error is None else failed
            into.append((sequence, delta))
        for account, count in charged.items():
            self.running_set.charge(account, count)
        for sequence, delta in running:
            sequence.sink(sequence, delta)
        self.running_set.end_together(ended)
        self.running_set.end_together(failed, keep=False)
        if step.accepted and step.proposer is not None and step.rows is not None:
            self.batch.policy.record(DraftedStep(step.rows, step.proposer, step.accepted, step.limits, copied))


def check_paged(models: Models) -> None:
    """Raise `UnsupportedError` if the models cannot run on a paged cache."""
    target, draft_model = models.target, models.draft_model
    reason = target.paged.reason or (draft_model and draft_model.paged.reason)
    if reason:
        raise UnsupportedError(f"{target.name} cannot be served on a paged cache: {reason}")
