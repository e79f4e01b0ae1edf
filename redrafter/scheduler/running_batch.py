"""The running batch: sequences of any kind side by side in one step, each in a row of its own.

All buffers stay where they are, so that a step over the first 1, 2, 4, ... rows is captured once and serves whichever
sequences occupy them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from redrafter.cache.paged import PagedCache
from redrafter.cache.to_device import to_device
from redrafter.drafting.proposer import Proposer, State
from redrafter.engine.batch import overshoot
from redrafter.engine.cuda_graphs import CapturedStep, CUDAGraphRunner, PendingReport, bucket, new_state
from redrafter.engine.engine import Engine
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.sampling.grammar_masks import RowGrammars
from redrafter.sampling.sampler import Sampler
from redrafter.scheduler.sampling_tensors import SamplingTensors
from redrafter.scheduler.sequence import TokenSequence
from redrafter.step import StepOutput

__all__ = ["RunningBatch"]

# Positions that the buffers of each row have at least, by type of device; the number doubles for longer sequences.
MIN_POSITIONS = {"cpu": 256, "cuda": 2048}


@dataclass(frozen=True)
class _Buffers:
    """Buffers of all rows, for sequences up to one length.

    Attributes:
        state: What a step reads of R rows: tokens `[R, T]`, lengths, hidden vectors and whether they are active.
        block_tables: Ids of the blocks of each row, `[R, T / BLOCK_SIZE]` int32.
    """

    state: State
    block_tables: Tensor


class RunningBatch:
    """The running batch. `sequences[i]` occupies row i; there are no gaps.

    Nothing here waits for the device: rows are changed by work that is launched behind the steps before.

    Attributes:
        engine: Target and proposers.
        graphs: Captured steps and KV cache.
        depth: Greatest number of successive drafts of any of the proposers.
        overshoot: Positions behind the last token of a sequence that a step may write to.
        params: Sampling parameters of all rows.
        sequences: Sequence of each row.
        captured_steps: The steps so far, by number of rows, whether a temperature is all that their sampling needs,
            whether a row follows a grammar, and whether any row verifies drafts.
    """

    def __init__(self, engine: Engine, graphs: CUDAGraphRunner, max_rows: int, speculate: bool = True):
        """Make an empty batch.

        Args:
            engine: Target and proposers.
            graphs: Captured steps and KV cache.
            max_rows: Most sequences at once.
            speculate: Whether any row verifies drafts.
        """
        self.engine, self.graphs = engine, graphs
        sizes = {bucket(rows) for rows in range(1, max_rows + 1)}
        self._proposers: dict[int, Proposer] = {
            rows: engine.proposer_for(rows) if speculate else engine.plain for rows in sizes
        }
        self.depth = max(proposer.depth for proposer in self._proposers.values())
        # A row that has ended takes part in one more step, where that is launched before the host knows.
        self.overshoot = self.depth + 1
        self.overshoot += max(overshoot(proposer) + proposer.scratch_slots for proposer in self._proposers.values())
        self.params = SamplingTensors(max(sizes), engine.target.vocab_size, engine.target.device)
        self.sequences: list[TokenSequence] = []
        self._positions = 0  # of a row's buffers
        self._buffers: _Buffers | None = None
        self.captured_steps: dict[tuple[int, bool, bool, bool], CapturedStep] = {}
        self._grammars = RowGrammars([])

    @property
    def sizes(self) -> list[int]:
        """Numbers of rows that steps are made for, the smallest first."""
        return sorted(self._proposers)

    @property
    def nodes(self) -> int:
        """Number of tree nodes that the next step verifies in each row."""
        return self._proposers[bucket(max(len(self.sequences), 1))].nodes

    @property
    def state(self) -> State:
        """Decoding state of all rows: the buffers that every step reads and writes in place.

        Raises:
            AssertionError: If no sequence was ever added, as the buffers are made for the first one.
        """
        assert self._buffers is not None
        return self._buffers.state

    @property
    def block_tables(self) -> Tensor:
        """Ids of the blocks of each row, `[R, T / BLOCK_SIZE]` int32. There are none before the first sequence."""
        assert self._buffers is not None
        return self._buffers.block_tables

    def add(self, sequence: TokenSequence, pending: Tensor | int, hidden: Tensor) -> None:
        """Add a row for a sequence whose committed tokens are in the cache.

        Args:
            sequence: A sequence with blocks.
            pending: Its pending token, which the host may not know yet, `[]` int64.
            hidden: What the target gave where the pending token was drawn, `[F]`.
        """
        self._reserve(sequence.max_length + self.overshoot)
        sequence.row = row = len(self.sequences)
        self.sequences.append(sequence)
        state, committed = self.state, sequence.prefill_length
        state.tokens[row, :committed] = to_device(sequence.tokens[:committed], state.tokens.device)
        state.tokens[row, committed] = pending
        state.length[row] = committed
        state.hidden[row], state.active[row] = hidden, True
        self.params.write(row, sequence.params, len(sequence.prompt), sequence.max_length)
        self.block_tables[row] = 0
        self.update_block_table(sequence)

    def update_block_table(self, sequence: TokenSequence) -> None:
        """Copy the ids of a sequence's blocks into its row, after it was given some."""
        assert sequence.block_table is not None
        assert sequence.row is not None
        tables = self.block_tables
        blocks = sequence.block_table.blocks[: tables.shape[1]]
        tables[sequence.row, : len(blocks)] = to_device(blocks, tables.device, tables.dtype)

    def remove(self, sequence: TokenSequence) -> None:
        """Remove a sequence, and move the last row into its place."""
        row, last = sequence.row, len(self.sequences) - 1
        assert row is not None
        state, tables = self.state, self.block_tables
        if row != last:
            for tensor in (state.tokens, state.length, state.hidden, tables):
                tensor[row] = tensor[last]
            self.params.move(last, row)
            self.sequences[row] = self.sequences[last]
            self.sequences[row].row = row
        self.sequences.pop()
        state.active[last] = False
        state.length[last] = 0
        tables[last] = 0
        sequence.row = None

    @property
    def guided(self) -> bool:
        """Whether a row follows a grammar, so that a step needs its text on the host."""
        return any(sequence.guide is not None for sequence in self.sequences)

    def step(self) -> tuple[StepOutput, PendingReport]:
        """Launch one step of all rows, without drafts if no row takes any.

        Returns:
            What is drawn, until the next step overwrites it, and its report on the way to the host: the tokens of each
            row and, last, its number of accepted drafts.
        """
        rows, drafting = bucket(len(self.sequences)), any(sequence.params.speculate for sequence in self.sequences)
        simple = all(sequence.params.simple for sequence in self.sequences)
        self._grammars.states[:] = [sequence.guide for sequence in self.sequences]
        key = (rows, simple, any(self._grammars.states), drafting)
        if key not in self.captured_steps:
            self.captured_steps[key] = self._capture(*key)
        step = self.captured_steps[key]
        report = step.replay()
        return step.output, report

    def sampler_of(self, sequences: Sequence[TokenSequence]) -> Sampler:
        """Return a sampler for sequences that have no rows yet, in their order."""
        tensors = SamplingTensors(len(sequences), self.engine.target.vocab_size, self.engine.target.device)
        for row, sequence in enumerate(sequences):
            tensors.write(row, sequence.params, len(sequence.prompt), sequence.max_length)
        guides = [sequence.guide for sequence in sequences]
        simple = all(sequence.params.simple for sequence in sequences)
        return tensors.sampler(len(sequences), simple, RowGrammars(guides) if any(guides) else None)

    def _capture(self, rows: int, simple: bool, guided: bool, drafting: bool) -> CapturedStep:
        """Make a step over the first rows, and capture it if the device can."""
        full, first = self.state, slice(rows)
        state = State(full.tokens[first], full.length[first], full.hidden[first], full.active[first])
        cache = PagedCache(self.graphs.store, self.block_tables[first])
        proposer = self._proposers[rows] if drafting else self.engine.plain
        rejection_sampling = drafting and self.engine.rejection_sampling
        sampler = self.params.sampler(rows, simple, self._grammars if guided else None, keep_scores=rejection_sampling)
        step = self.graphs.step_over(state, proposer, cache, sampler)
        if self.engine.target.device.type == "cuda":
            active = state.active.clone()
            state.active.zero_()  # the run that is captured must change nothing
            self.graphs.capture(step)
            state.active.copy_(active)
        return step

    def _reserve(self, positions: int) -> None:
        """Make sure that rows have buffers for so many positions. Larger buffers need new captured steps."""
        if positions <= self._positions:
            return
        target, rows = self.engine.target, len(self.params.seeds)
        self._positions = max(MIN_POSITIONS[target.device.type], 1 << (positions - 1).bit_length())
        tables = torch.zeros(rows, self._positions // BLOCK_SIZE, dtype=torch.int32, device=target.device)
        larger = _Buffers(new_state(target, rows, self._positions), tables)
        if self._buffers is not None:
            old = self._buffers
            larger.state.tokens[:, : old.state.tokens.shape[1]] = old.state.tokens
            larger.block_tables[:, : old.block_tables.shape[1]] = old.block_tables
            # All else of a state has the same shape for sequences of any length.
            larger = replace(larger, state=replace(old.state, tokens=larger.state.tokens))
            if target.device.type == "cuda":
                torch.cuda.synchronize(target.device)  # a step may still run in the buffers that are given up
        self._buffers = larger
        self.captured_steps.clear()
