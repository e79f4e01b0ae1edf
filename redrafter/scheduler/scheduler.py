"""Continuous batching: which sequences wait, whose prompts are read, and which rows step.

A round admits the sequences that there is room for, reads a chunk of the prompts that are not in the cache yet, and
then makes one step of all rows. So a long prompt delays running sequences by a chunk, never by its whole length, and a
sequence that ends makes room in the next round. The tokens of a sequence depend on none of that: draws are keyed by
seed and position.

On a GPU, a step's forward reads chunks of prompts beside the trees of the rows, since a step of few tokens takes as
long as one of some more. Prompts have a forward of their own where they outnumber the rows that must wait for it.

Which sequence is admitted next is decided by client (`waiting_queue`), which one gives way where there are too few
places or blocks in `admission`, and how much of the prompts a round reads by the time that earlier chunks took
(`prefill_budget`). No round looks at every waiting sequence.

On a GPU the host is one step behind: a step is launched before the tokens of the one before it are read, so that the
GPU never waits for Python. A sequence that turns out to have ended takes part in one more step, whose tokens nobody
reads. What is launched later runs later, so its row and its blocks can be given away at once.
"""

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from math import isnan

import torch

from redrafter.drafting.vocabulary_map import DraftText
from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.scheduler.cuda_graphs import CUDAGraphRunner, bucket
from redrafter.scheduler.launched import LaunchedPrefill, LaunchedStep, Timer
from redrafter.scheduler.limits import Limits, check_sequences
from redrafter.scheduler.models import Models, check_paged
from redrafter.scheduler.prefill import Chunk, PrefilledRows, Prefiller, padded_tokens
from redrafter.scheduler.row_caches import PagedRows
from redrafter.scheduler.running_batch import RunningBatch
from redrafter.scheduler.running_set import Admission, Places
from redrafter.scheduler.sampling_tensors import SamplingTensors
from redrafter.scheduler.sequence import SequenceDelta, TokenSequence, not_finite
from redrafter.scheduler.sequence_blocks import SequenceBlocks
from redrafter.step import StepOutput

_LOG = logging.getLogger(__name__)


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
        on_failure: Called with an exception that ended sequences, and how many there were.
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
        self._draft_vocabulary = engine.draft_vocabulary if speculate else None
        if batch is None:
            assert graphs is not None, "sequences of any kind are on a paged cache"
            check_paged(engine)
            rows = bucket(limits.max_batch_size)
            sampling = SamplingTensors(rows, engine.target.vocab_size, engine.target.device)
            caches = PagedRows(graphs, draft_model is not None, self._draft_vocabulary)
            batch = RunningBatch(engine.target, sampling, rows, caches, graphs)
        self.batch = batch
        batch.draft_with(engine, limits.max_batch_size, speculate=speculate)
        self.prefiller = Prefiller(engine.target, draft_model, limits)
        self._blocks = None if graphs is None else SequenceBlocks(graphs, draft_model is not None, limits.reuse)
        self._places = Places(batch, self._blocks)
        self._admission = Admission(self._places, batch, self._blocks)
        self.longest = self._bound()
        self.overlap = graphs is not None and engine.target.device.type == "cuda"
        self.reads_beside = self.overlap and self.prefiller.can_read_beside
        self.on_failure: Callable[[Exception, int], object] = self._log_failure
        self._launched: deque[LaunchedStep | LaunchedPrefill] = deque()  # not read yet, in their order

    def _bound(self) -> int:
        """Return the most tokens of a sequence that can be served."""
        bounds = [self.limits.max_seq_len, self.engine.target.context]
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
        return self._places.idle and not self._launched

    @property
    def waiting(self) -> int:
        """Number of sequences that wait for a place."""
        return self._places.waiting

    @property
    def running(self) -> int:
        """Number of sequences that hold a place: those that step and those whose prompts are being read."""
        return self._places.running

    @property
    def clients(self) -> int:
        """Number of clients with a sequence that waits or holds a place."""
        return self._places.clients

    @property
    def preempted(self) -> int:
        """Number of sequences put back into the queue so far."""
        return self._admission.preempted

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
        if self._draft_vocabulary is not None:
            for sequence in sequences:
                sequence.draft_text = DraftText(self._draft_vocabulary)
        self._places.enqueue(sequences, self.limits)

    def cancel(self, *sequences: TokenSequence) -> None:
        """End sequences before their next step, except those that have ended or were never submitted."""
        self._places.cancel(sequences)

    def cancel_all(self) -> None:
        """End every sequence that waits or runs before its next step. For the thread that runs the rounds."""
        self._places.cancel_all()

    def abandon(self) -> None:
        """Take back what sequences hold, without reporting anything to them. For the thread that runs the rounds."""
        self._launched.clear()
        self._places.abandon()

    def round(self) -> None:
        """Admit sequences, read a chunk of their prompts, and step all rows."""
        self.read()
        self.step()

    @torch.inference_mode()
    def read(self) -> None:
        """Run the first half of a round, which draws the first token of every prompt that is complete."""
        with self._ending(lambda: self._places.sequences):
            self._places.end_cancelled()
            self._admit()
            self._prefill()

    @torch.inference_mode()
    def step(self) -> None:
        """Run the second half of a round: one step of all rows."""
        with self._ending(lambda: tuple(self.batch.rows)):
            self._grow_block_tables()
            self._step()

    @contextmanager
    def _ending(self, sequences: Callable[[], Sequence[TokenSequence]]) -> Iterator[None]:
        """End sequences with the exception that is raised in the context, if any is; all others go on.

        Args:
            sequences: Returns the sequences that the work in the context may have damaged.
        """
        try:
            yield
        except Exception as error:
            self._fail(sequences(), error)

    def _fail(self, sequences: Sequence[TokenSequence], error: Exception) -> None:
        """End sequences with an exception, which goes to `on_failure` and is not raised again."""
        for sequence in sequences:
            self._places.end(sequence, SequenceDelta((), finish="error", error=error), keep=False)
        if not self.batch.rows:
            self._launched.clear()  # nobody waits for its draws, and to read them may fail again
        self.on_failure(error, len(sequences))

    def _admit(self) -> None:
        """Give places and blocks to sequences that wait."""
        self._admission.admit(self.limits, self.settle, reads_beside=self.reads_beside)

    def _prefill(self) -> None:
        """Launch forwards that read on in the prompts, and let those that are complete take part in the next step."""
        beside = self._read_beside_rows()
        alone = [sequence for sequence in self._places.prefilling if sequence not in beside]
        if not alone:
            return
        for chunks in self.prefiller.choose(alone, self.batch.step_nodes):
            self._read_chunks(chunks)

    def _read_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Launch a forward over prompts alone. It writes to what their sequences hold, so an error ends no others."""
        timer = Timer(self.engine.target.device)
        seeing = chunks[0][0].images is not None
        with self._ending(lambda: [sequence for sequence, _ in chunks if not sequence.ended]):
            try:
                rows = self.prefiller.forward(chunks, self.batch.caches)
            except (ArgumentError, UnsupportedError) as error:
                if not seeing:
                    raise
                # These images are wrong, which is no failure.
                self._places.end(chunks[0][0], SequenceDelta((), finish="error", error=error), keep=False)
                return
            self._publish(rows)
            first = self._start_decoding(rows)
            timer.stop()
            # How long images take says nothing of other prompts.
            size = 0 if seeing else padded_tokens(chunks, self.prefiller.padded)
            self._launch(LaunchedPrefill(first, size, timer))

    def _publish(self, rows: PrefilledRows) -> None:
        """Let later sequences find the prompts that are in the cache."""
        if self._blocks is not None:
            for sequence in rows.sequences:
                self._blocks.publish(sequence, sequence.prefill_length)

    def _read_beside_rows(self) -> list[TokenSequence]:
        """Return the sequences whose prompts are read in the forwards of steps."""
        if not self.reads_beside or len(self._places.prefilling) > len(self.batch.rows):
            return []
        # A prompt that is scored needs the logits of all its tokens; one with images, a forward of the model's own.
        return [
            sequence for sequence in self._places.prefilling if not sequence.needs_scores and sequence.images is None
        ]

    def _start_decoding(self, rows: PrefilledRows) -> LaunchedStep | None:
        """Let sequences whose prompts are complete take part in the next step, unless no token is to follow.

        Returns:
            The draws of their first tokens; None where there are none.
        """
        for sequence in rows.sequences:
            if any(isnan(score.logprob) for score in sequence.prompt_scores):
                error = not_finite(len(sequence.prompt))
                self._places.end(sequence, SequenceDelta((), finish="error", error=error), keep=False)
            elif not sequence.max_new_tokens:
                self._places.end(sequence, SequenceDelta((), finish="length"))
        rows = rows.at([row for row, sequence in enumerate(rows.sequences) if not sequence.ended])
        first = self.batch.begin(rows)
        for sequence in rows.sequences:
            del self._places.prefilling[sequence]
        return first

    def _grow_block_tables(self) -> None:
        """Give each row blocks for its next step."""
        if grown := self._admission.grow(self.settle):
            self.batch.update_block_tables(grown)

    def _step(self) -> None:
        """Launch a step of all rows, unless what is launched already ends them all."""
        sequences = self.batch.rows
        # The host's processors must know the texts; and each forward that was launched adds a token at least.
        if self.batch.asks_host or all(s.written + s.launched >= s.max_new_tokens for s in sequences):
            self.settle()
        older = len(self._launched)
        if self.batch.rows:
            self._launch_step()
        # The device goes on with this step meanwhile.
        for _ in range(min(older, len(self._launched))):
            self._finish(self._launched.popleft())

    def _launch_step(self) -> None:
        """Launch a step of all rows, which reads chunks of prompts beside them."""
        chunks = self.prefiller.choose_beside(self._read_beside_rows(), self.batch.step_nodes)
        beside = [sequence for sequence, _ in chunks]
        lock = nullcontext() if self._graphs is None else self._graphs.lock
        with self._ending(lambda: [s for s in dict.fromkeys((*self.batch.rows, *beside)) if not s.ended]), lock:
            step, output = self.batch.step(chunks)
            self._launch(step)
            if chunks:
                self._finish_chunks(chunks, output)

    def _finish_chunks(self, chunks: Sequence[Chunk], output: StepOutput) -> None:
        """Let prompts that a step has read to their ends take part in the next one."""
        assert output.chunk_ends is not None
        read = self.prefiller.finish_beside(chunks, output.chunk_ends, self.batch.caches)
        if read is not None:
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

    def settle(self) -> bool:
        """Wait for all forwards that were launched, and report their tokens. For the thread that runs the rounds.

        Returns:
            Whether any was launched.
        """
        any_launched = bool(self._launched)
        while self._launched:
            self._finish(self._launched.popleft())
        return any_launched

    def _finish(self, forward: LaunchedStep | LaunchedPrefill) -> None:
        """Wait for a forward, and report its tokens to the sequences that have not ended meanwhile."""
        if isinstance(forward, LaunchedPrefill):
            if forward.first is not None:
                self._report(forward.first)
            if forward.size:
                seconds = self.engine.target.ranks.from_first(forward.timer.seconds)  # or ranks would read other chunks
                self.prefiller.pace.measure(forward.size, seconds)
        else:
            self._report(forward)

    def _report(self, step: LaunchedStep) -> None:
        rows = tokens = 0  # of rows that took drafts
        for sequence, drawn in step.read():
            sequence.launched -= 1
            if sequence.ended:
                continue
            if drawn.drafted is not None:
                rows, tokens = rows + 1, tokens + len(drawn.tokens)
                if self.batch.draft_lengths is not None:
                    self.batch.draft_lengths.observe(sequence.index, max(len(drawn.tokens) - 1, 0), step.levels)
            self._append(sequence, drawn)
        if rows and self.batch.draft_pauses is not None:
            self.batch.draft_pauses.observe(len(step.sequences), rows, tokens)

    def _append(self, sequence: TokenSequence, drawn: SequenceDelta) -> None:
        """Append tokens as `TokenSequence.append` does, and report them; a sequence that ends gives its place back."""
        try:
            delta = sequence.append(drawn)
        except Exception as error:  # of a criterion of this text
            self._fail([sequence], error)
            return
        self._places.charge(sequence, len(delta.tokens))
        if delta.finish is None:
            sequence.sink(sequence, delta)
        else:
            self._places.end(sequence, delta, keep=delta.error is None)
