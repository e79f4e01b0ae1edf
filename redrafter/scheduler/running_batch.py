"""The running batch: sequences that are decoded together in one step, each in one row.

All buffers keep their addresses, so that a step over the first 1, 2, 4, ... rows is captured once and serves whichever
sequences occupy them.

Buffers are allocated once for the longest possible sequence. A step sees only a window of them, the first positions:
the longest current sequence, rounded up to a power of two. So a step costs what the current lengths cost, within a
factor of two, and is captured once for each window.
"""

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from redrafter.attention.tree_plan import PromptChunks
from redrafter.cache.kv_cache import KVCache
from redrafter.cache.to_device import move_indices, to_device
from redrafter.drafting.policy import DraftPolicy, StepRows
from redrafter.drafting.proposer import Proposer, State, step_tokens
from redrafter.features import ADAPTERS
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.model.forward_batch import Prompts
from redrafter.model.shared_model import Revision
from redrafter.model.target import Target
from redrafter.scheduler.captured_step import (
    CapturedStep,
    HostCopy,
    LaunchedForward,
    LaunchedStep,
    StepKey,
    Timer,
    bucket,
    new_state,
)
from redrafter.scheduler.draft_reader import DraftReader
from redrafter.scheduler.engine_change import Models
from redrafter.scheduler.paged_memory import PagedMemory
from redrafter.scheduler.prefill import NO_PROMPTS, ChunkBuffers, PrefilledRows, PromptStep
from redrafter.scheduler.row_caches import DenseRows, PagedRows, RowCaches
from redrafter.scheduler.sampling_tensors import SamplingTensors
from redrafter.scheduler.sequence import TokenSequence
from redrafter.step import StepOutput, draw_first_tokens

# Positions that the buffers of each row and the window of a step have at least, by type of device.
MIN_POSITIONS = {"cpu": 256, "cuda": 2048}
# Captured steps of one batch; the least recently used are dropped. A server captures some 600 for one window.
MAX_CAPTURED_STEPS = 1024
# One row in this many may be empty before those of a bulk call are moved, which takes some 40 launches.
ROWS_PER_EMPTY_ROW = 32
GRAPH_BYTES = 2 << 20  # estimate for a captured step without its output: some hundred kernels and arguments


def overshoot(proposer: Proposer) -> int:
    """Return how many positions past its limit a row may write to.

    Its last step may overshoot by K tokens, the step launched before the host knows by K + 1, later drafts by K more.
    """
    return 3 * proposer.depth + 2


class BatchRequirements(NamedTuple):
    """Combines the requirements of the sequences of all rows. They change only when a sequence is added or removed.

    Attributes:
        sampling: Key of the sampling operations that a step runs, from `SamplingTensors.kind`.
        speculate: Number of sequences that take drafts.
        sampled: Whether any sequence samples.
        logits: Whether any sequence needs logits or processed scores in addition to its tokens.
        adapters: Whether any sequence has an adapter.
    """

    sampling: Hashable
    speculate: int
    sampled: bool
    logits: bool
    adapters: bool


class RunningBatch:
    """The running batch: `rows[i]` occupies row i, or did until it ended; few rows are empty, and never all of them.

    No method waits for the device: rows are changed by operations that are enqueued after the previous steps.

    Attributes:
        target: The model that verifies.
        sampling: How the rows draw.
        rows: Last sequence of each row, which has ended if the row is empty.
        asks_host: Whether a step runs Python code of a row's processor.
        depth: Greatest number of successive drafts of any of the proposers.
        overshoot: Positions after the last token of a sequence that a step may write to.
        policy: Decides the draft tree of each step.
        captured_steps: The steps so far, the one used last at the end.
    """

    def __init__(
        self, target: Target, sampling: SamplingTensors, rows: int, caches: RowCaches, memory: PagedMemory | None = None
    ):
        """Make an empty batch of at most `rows` rows. Without `memory`, its steps run uncaptured."""
        self.target, self.sampling, self.caches, self._all_rows = target, sampling, caches, rows
        self._memory = memory
        self.rows: list[TokenSequence] = []
        self.asks_host = False
        self._empty: list[int] = []
        self.captured_steps: dict[StepKey, CapturedStep] = {}
        self._requirements: BatchRequirements | None = None  # None after the rows have changed
        self._positions = 0  # of a row's buffers
        self._state: State | None = None
        self._chunk_buffers: ChunkBuffers | None = None
        self._models: list[Target] = []
        self._revisions: list[Revision] = []  # of the models, which captured steps belong to

    def draft_with(self, models: Models, rows: int, *, speculate: bool) -> None:
        """Set the proposers of later steps, of models that are up to date. Call only while there are no sequences.

        Stored prefixes and captured steps of earlier revisions of the models are dropped.
        """
        assert not self.rows, "rows are drafted for already"
        self._models = [self.target]
        if speculate and models.draft_model is not None:
            self._models.append(models.draft_model)
        if self.outdated:
            self._drop_captured_steps()
        self._revisions = [model.revision for model in self._models]
        if self._memory is not None:
            self._memory.follow_changes(self._models)
        self._undrafted, self._rejection_sampling = models.undrafted, models.rejection_sampling
        self._logits_reader = models.logits_reader if speculate else None
        # Batch size of a step by number of sequences; a captured step may have padding rows.
        self._sizes = {n: min(bucket(n), self._all_rows) if self._memory else n for n in range(1, rows + 1)}
        nothing = dict.fromkeys(self.sizes, models.undrafted)
        self.policy = models.draft_policy(self.sizes, self._memory) if speculate else DraftPolicy(nothing)
        every = self.policy.proposers
        self.depth = max(proposer.depth for proposer in every)
        copies = any(proposer.without_text is not None for proposer in every)
        # Only a CPU's step is read before the next is chosen, so only there all tokens are known to the host.
        self._knows_matches = copies and self.target.device.type == "cpu"
        self.overshoot = max(overshoot(proposer) + proposer.scratch_slots for proposer in every)
        self._translates = speculate and models.draft_vocabulary is not None
        draft_model = models.draft_model if speculate else None
        self._reader = None if draft_model is None else DraftReader(draft_model, self.policy)

    @property
    def follows(self) -> bool:
        """Return whether the models are unchanged since `draft_with`."""
        return all(model.revision == seen for model, seen in zip(self._models, self._revisions, strict=True))

    @property
    def outdated(self) -> bool:
        """Return whether captured steps have addresses, or ran code, that the models have no longer."""
        return any(m.revision.steps != seen.steps for m, seen in zip(self._models, self._revisions, strict=False))

    @property
    def sizes(self) -> list[int]:
        """Batch sizes of steps, including padding rows, in ascending order."""
        return sorted(set(self._sizes.values()))

    @property
    def step_nodes(self) -> tuple[int, int]:
        """Number of tree nodes that a step computes now, with drafts and without, including those of padding rows."""
        size = self._sizes[len(self.rows)] if self.rows else 0
        return step_tokens(self.policy.choices(max(size, 1))[0], size), size

    @property
    def state(self) -> State:
        """Decoding state of all rows: the buffers that every step reads and writes in place.

        Raises:
            AssertionError: If no sequence was ever added, as the buffers are made for the first one.
        """
        assert self._state is not None
        return self._state

    def begin(self, read: PrefilledRows) -> LaunchedStep | None:
        """Draw the first tokens that follow prompts, and add rows for their sequences.

        A preempted sequence has its pending token already.

        Returns the draws; None where there are none.
        """
        pending = read.lengths.clone()  # [B]
        new = [row for row, sequence in enumerate(read.sequences) if not sequence.written]
        if len(new) < len(read.sequences):
            pending = to_device([sequence.tokens[-1] for sequence in read.sequences], pending.device, pending.dtype)
        first = None
        if new:
            drawn = read.at(new)
            sampler, window = self.sampling.sampler_of(drawn.sequences), drawn.caches.target.window
            _, output = draw_first_tokens(
                drawn.tokens,
                drawn.lengths,
                drawn.logits,
                drawn.hidden,
                window=window,
                sampler=sampler,
                ranks=self.target.ranks,
            )
            first = LaunchedStep.from_output(drawn.sequences, output, HostCopy(output.report.packed))
            pending[to_device(new, pending.device, torch.long)] = output.report.tokens[:, 0]
        self.add(read, pending)
        return first

    def add(self, read: PrefilledRows, pending: Tensor) -> None:
        """Add rows for R sequences whose committed tokens are in the cache.

        The host may not know yet the pending token of each, `[R]` int64.
        """
        sequences, first = read.sequences, len(self.rows)
        if not sequences:
            return
        # Before rows are added, as growing copies the buffers and drops captured steps.
        self.reserve(max(sequence.max_length for sequence in sequences))
        self.rows += sequences
        self.asks_host |= any(sequence.request.params.asks_host for sequence in sequences)
        self._requirements = None
        rows = slice(first, len(self.rows))
        for row, sequence in enumerate(sequences, start=first):
            sequence.row = row
        state = self.state
        state.tokens[rows, : read.tokens.shape[1]] = read.tokens
        state.tokens[rows].scatter_(1, read.lengths[:, None], pending[:, None])
        state.length[rows], state.hidden[rows], state.active[rows] = read.lengths, read.hidden, True
        for feature, buffer in state.inputs.items():
            buffer[rows] = to_device([sequence.inputs[feature] for sequence in sequences], buffer.device, torch.long)
        if self._logits_reader is not None:
            self._logits_reader.read_prompts(state.at(rows), read.tokens.shape[1])
        self.sampling.write(first, sequences)
        self.caches.add(first, sequences, read.caches, read.rows)

    def update_block_tables(self, sequences: Sequence[TokenSequence]) -> None:
        """Copy the ids of blocks into the rows of sequences, after these were given some."""
        sequences = [sequence for sequence in sequences if sequence.row is not None]
        if sequences:
            assert isinstance(self.caches, PagedRows)
            self.caches.update(sequences)

    def remove(self, sequences: Sequence[TokenSequence], *, bulk: bool = False) -> None:
        """Remove sequences that have rows, at least one. The last rows move into their slots, all at once.

        On a GPU this launches some 40 copies, however many sequences are removed. With `bulk`, rows of sequences stay
        in place, inactive, until one in `ROWS_PER_EMPTY_ROW` is empty.
        """
        ended = [sequence.row for sequence in sequences if sequence.row is not None]
        for sequence in sequences:
            sequence.row = None
        self._empty += ended
        # Code on the host that computes scores, such as a grammar, must not be called for a text that has ended.
        bulk = bulk and not any(sequence.request.params.asks_host for sequence in sequences)
        if bulk and len(self._empty) < len(self.rows) // ROWS_PER_EMPTY_ROW:
            for row in ended:
                self._deactivate(slice(row, row + 1))
            return
        removed, self._empty, self._requirements = {*self._empty}, [], None
        left = len(self.rows) - len(removed)
        slots = sorted(row for row in removed if row < left)
        last = [row for row in range(left, len(self.rows)) if row not in removed]
        if slots:
            source, to = move_indices(last, slots, self.target.device)
            for tensor in self.state.tensors:  # `active` too: both rows step
                tensor[to] = tensor[source]
            self.sampling.move(source, to)
            self.caches.move(last, slots, (source, to))
        for row, old in zip(slots, last, strict=True):
            self.rows[row] = self.rows[old]
            self.rows[row].row = row
        free = slice(left, len(self.rows))
        del self.rows[left:]
        self.asks_host = self.asks_host and any(sequence.request.params.asks_host for sequence in self.rows)
        self._deactivate(free)

    def _deactivate(self, rows: slice) -> None:
        """Let rows neither advance nor write to blocks of sequences."""
        self.state.active[rows].fill_(False)  # `[rows] = ...` may wait for the device
        self.state.length[rows].fill_(0)
        self.caches.clear(rows)

    def step(self, prompts: PromptStep = NO_PROMPTS) -> tuple[LaunchedForward, StepOutput]:
        """Launch one step of all rows, without drafts if no row takes any. The caller holds the lock of the memory.

        Without rows, it reads chunks of prompts alone.

        Returns the launched step, and its output, which the next step may overwrite.
        """
        if prompts.chunks:
            self.reserve(max(sequence.max_length for sequence, _ in prompts.chunks))
        rows = self.describe_rows(prompts.tokens)
        step = self.prepare_step(rows, prompts)
        # A step that also reads prompts, or pays for what only first ones pay for on a GPU, is not timed.
        timed = self.rows and not prompts.chunks and (step.ran or self.target.device.type == "cpu")
        times = self.policy.times if timed else None
        timer = correct = None
        if times is not None and times.due(rows.size, step.proposer, sampled=rows.sampled):
            timer = Timer(self.target.device, times.clock)
        packed = step.replay()
        # A search that found no likely draft takes neither the time of drafts nor that of a step without a search.
        found = step.output.levels > 0 or step.proposer is self._undrafted
        if times is not None and timer is not None and found:
            timer.stop()
            correct = partial(times.correct, rows.size, step.proposer, cached=rows.cached, sampled=rows.sampled)
        needs = self.requirements.logits
        draws = LaunchedStep.from_output(tuple(self.rows), step.output, packed, step.proposer, rows, needs_logits=needs)
        return LaunchedForward(draws, timer, correct), step.output

    def describe_rows(self, prompt_tokens: int = 0) -> StepRows:
        """Describe the rows of the next step, which also reads so many tokens of prompts."""
        speculating = self.requirements.speculate
        match = None
        if self._knows_matches:  # a CPU's step is read before the next one, so all tokens are known
            match = any(row.request.params.speculate and row.repeats.has_match(row.tokens) for row in self.rows)
        return StepRows(
            self._sizes[max(len(self.rows), 1)],  # without sequences, the step has one inactive row
            len(self.rows),
            speculating,
            prompt_tokens=prompt_tokens,
            cached=sum([len(sequence.tokens) for sequence in self.rows]),  # a list is faster than a generator
            match=match,
            sampled=self.requirements.sampled,
            unread=sum([len(row.tokens) - 1 - row.unread_from for row in self.rows if row.unread_from is not None]),
        )

    def prepare_step(self, step_rows: StepRows, prompts: PromptStep = NO_PROMPTS) -> CapturedStep:
        """Return the next step of all rows, which is captured if it is the first of its kind."""
        chunks, requirements = prompts.chunks, self.requirements
        rows, proposer = step_rows.size, self._choose_proposer(step_rows)

        # 1. The window of positions that the step sees.
        ahead = self.depth + 1  # tokens by which each step that was launched may advance a row
        # The most committed tokens that a row can have, and their number in the draft model's vocabulary.
        longest = longest_draft = max([len(row.tokens) - 1 + ahead * row.launched for row in self.rows], default=0)
        if self._translates:
            longest_draft = max(row.draft_bound(len(row.tokens) + ahead * row.launched) - 1 for row in self.rows)
        # On a CPU a step's own proposer limits its window; that of a captured step is the same for all proposers.
        reach = overshoot(proposer) + proposer.scratch_slots if self.target.device.type == "cpu" else self.overshoot
        window = min(self._round_up(longest + reach), self._positions)
        self.caches.prepare(rows, longest, longest_draft, proposer)

        # 2. The chunks of prompts that it reads.
        room: PromptChunks | None = None
        if chunks:
            if self._chunk_buffers is None:
                self._chunk_buffers = ChunkBuffers(self._positions // BLOCK_SIZE, self.target)
            room = self._chunk_buffers.load(chunks, prompts.room)
        # A step without adapters skips their matrices, so it needs a separate key.
        adapted = requirements.adapters or any(sequence.request.adapter is not None for sequence, _ in chunks)
        version = self.target.adapters.stacks.version if adapted else 0

        # 3. The step captured for this key, or a new one.
        key = StepKey(
            rows,
            window,
            requirements.sampling,
            id(proposer),
            room.count if room else 0,
            requirements.logits,
            version,
            id(self._logits_reader),
        )
        # Popped and inserted again below, which keeps the dict in the order of last use.
        step = self.captured_steps.pop(key, None)
        if step is None:
            step = self._make_step(key, proposer, room)
        self.captured_steps[key] = step
        # Not captured: only the one step at which a row crosses the switch of its rope needs it.
        if self.target.reread_from is not None and longest >= self.target.reread_from:
            state = step.state
            at_switch = (state.length == self.target.reread_from) & state.active
            self.target.reread(state.tokens, at_switch, step.cache, state.inputs)
        if self._reader is not None and self.rows and self.target.device.type == "cpu":
            self._reader.prepare_step(self.rows, step, self.caches)
        return step

    def read_drafts(self, sequences: Sequence[TokenSequence], prompts: Prompts, cache: KVCache | None) -> None:
        """Read chunks of prompts into a draft model's cache too, if there is one and drafts may pay."""
        if self._reader is None:
            return
        assert cache is not None, "a draft model has a cache"
        rows = min(len(self.rows) + len(sequences), len(self._sizes))
        sampled = any(not sequence.request.params.greedy for sequence in (*self.rows, *sequences))
        unread = sum(prompts.ends) - sum(prompts.starts)
        step = StepRows(self._sizes[rows], rows, rows, sampled=sampled, unread=unread)
        self._reader.read_prompts(sequences, prompts, cache, wanted=self.policy.wants_prompts(step))

    @property
    def requirements(self) -> BatchRequirements:
        """Return what the sequences of the rows require together; the first call loads them into the sampler."""
        if self._requirements is None:
            self.sampling.load_texts(self.rows)
            self._requirements = BatchRequirements(
                self.sampling.kind(self.rows),
                sum(sequence.request.params.speculate for sequence in self.rows),
                any(not sequence.request.params.greedy for sequence in self.rows),
                any(sequence.request.keeps or sequence.request.params.logprobs is not None for sequence in self.rows),
                any(sequence.request.adapter is not None for sequence in self.rows),
            )
        return self._requirements

    def _choose_proposer(self, rows: StepRows) -> Proposer:
        """Return the proposer of the next step."""
        if not rows.drafting:
            return self._undrafted
        proposer = self.policy.choose(rows)
        # A dense cache is read in all rows or in none: one more step without drafts, and no row is up to date.
        behind = {row.unread_from is not None for row in self.rows}
        mixed = len(behind) > 1 and isinstance(self.caches, DenseRows)
        return self._undrafted if mixed and proposer.model is not None else proposer

    def _make_step(self, key: StepKey, proposer: Proposer, chunks: PromptChunks | None) -> CapturedStep:
        """Make a step over the first rows, and capture it if the device can."""
        for old in [old for old in self.captured_steps if 0 < old.adapters < key.adapters]:
            del self.captured_steps[old]  # its adapter stacks were replaced, so no later step has its key
        # The least recently used is the first, since a step is inserted again at each use.
        while len(self.captured_steps) >= MAX_CAPTURED_STEPS:
            del self.captured_steps[next(iter(self.captured_steps))]
        first = self.state.at(slice(key.rows))  # shares memory with `state`
        inputs = {feature: x for feature, x in first.inputs.items() if feature is not ADAPTERS or key.adapters}
        state = replace(first, tokens=first.tokens[:, : key.window], inputs=inputs)
        caches = self.caches.of_step(key.rows, key.window)
        # Rejection sampling compares the target's distribution with the drafter's.
        keep_scores = self._rejection_sampling and proposer is not self._undrafted
        sampler = self.sampling.sampler(key.rows, self.rows, keep_scores=keep_scores)
        reader, drafts = self._reader, caches.draft
        read_drafts = partial(reader.read_chunks, chunks, state, drafts) if reader and chunks and drafts else None
        step = CapturedStep(
            state,
            proposer,
            self.target,
            caches.target,
            sampler,
            None if proposer.model is None else drafts,
            chunks,
            read_drafts,
            reader=self._logits_reader,
            keeps_logits=key.keeps_logits,
        )
        if self._memory is not None:
            # Capturing runs the step once, which would advance real rows.
            active = state.active.clone()
            state.active.zero_()  # the run that is captured must change nothing
            self._memory.capturer.capture(step)
            state.active.copy_(active)
        return step

    def reserve(self, longest: int) -> None:
        """Grow the buffers of rows to `longest` tokens if needed, which invalidates captured steps."""
        positions = longest + self.overshoot
        if positions <= self._positions:
            return
        size = self._round_up(positions)
        # Steps in flight still read the old buffers, whose memory is reused once they are dropped.
        self._wait_for_device()
        # Clear first: if an allocation below fails, captured steps would not fit the partly grown buffers.
        self.captured_steps.clear()
        self._chunk_buffers = None
        larger = new_state(self.target, self._all_rows, size)
        if self._state is not None:
            larger.tokens[:, : self._state.tokens.shape[1]] = self._state.tokens
            # The other tensors of the state have the same shape for all lengths.
            larger = replace(self._state, tokens=larger.tokens)
        self.caches.reserve(self._all_rows, size)
        self._state, self._positions = larger, size

    def _round_up(self, positions: int) -> int:
        """Round a number of positions up to one of a few sizes, at most the longest possible sequence.

        The result is a multiple of the block size.
        """
        whole = -(-positions // BLOCK_SIZE) * BLOCK_SIZE
        size = max(MIN_POSITIONS.get(self.target.device.type, 0), 1 << (whole - 1).bit_length())
        if self.target.context is None:
            return size
        most = -(-(self.target.context + self.overshoot) // BLOCK_SIZE) * BLOCK_SIZE
        return max(whole, min(size, most))

    @property
    def num_bytes(self) -> int:
        """Bytes that the batch holds for sequences and captured steps, without the tensors of sampling."""
        texts = 0 if self._state is None else self._state.tokens.nbytes + self.caches.num_bytes
        return texts + sum(x.num_bytes + GRAPH_BYTES * (x.graph is not None) for x in self.captured_steps.values())

    def free(self) -> None:
        """Release all buffers and captured steps, while there are no sequences."""
        assert not self.rows, "rows are in the buffers"
        self._drop_captured_steps()
        self._state, self._chunk_buffers, self._positions = None, None, 0

    def _drop_captured_steps(self) -> None:
        # No graph may be freed while another is captured.
        with nullcontext() if self._memory is None else self._memory.lock:
            self._wait_for_device()
            self.captured_steps.clear()

    def _wait_for_device(self) -> None:
        """Wait until no step reads or writes the buffers, which are about to be released."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
