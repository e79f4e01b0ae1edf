"""The rows of a server: requests of any kind side by side in one step, each in a place of its own.

All buffers stay where they are, so that a step over the first 1, 2, 4, ... places is captured once and serves whoever
stands there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from redrafter.cache.paged import PagedCache
from redrafter.drafting.proposer import Proposer, State
from redrafter.engine.batch import room
from redrafter.engine.cuda_graphs import CapturedStep, CUDAGraphRunner, bucket, new_state
from redrafter.engine.engine import Engine
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.sampling.grammar_masks import RowGrammars
from redrafter.sampling.hf_processors import Processor
from redrafter.sampling.processors import (
    RowBias,
    RowMinimum,
    RowMinP,
    RowPenalties,
    RowRepetition,
    RowTemperature,
    RowTopK,
    RowTopP,
)
from redrafter.sampling.sampler import Sampler
from redrafter.scheduler.sequence import SamplingParams, TokenSequence
from redrafter.step import StepOutput

__all__ = ["RunningBatch", "SamplingTensors"]

NARROW = {"cpu": 256, "cuda": 2048}  # positions that rows have room for at least; it doubles as longer ones come


class SamplingTensors:
    """What `Sampler` reads of each row, written row by row."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device):
        zeros = lambda kind: torch.zeros(rows, dtype=kind, device=device)  # noqa: E731
        ones = lambda: torch.ones(rows, device=device)  # noqa: E731
        self.seeds, self.prompt, self.limit = (zeros(torch.long) for _ in range(3))
        self.greedy, self.plain = zeros(torch.bool), zeros(torch.bool)
        self.temperature, self.repetition, self.top_p = ones(), ones(), ones()
        self.frequency, self.presence, self.min_p = (zeros(torch.float32) for _ in range(3))
        self.top_k, self.minimum = zeros(torch.long), zeros(torch.long)
        self.ids = torch.arange(vocabulary, device=device)
        self._wide: tuple[Tensor, Tensor] | None = None  # bias and end tokens, made when somebody needs them

    def write(self, row: int, params: SamplingParams, prompt: int, limit: int) -> None:
        """Put one request's params in a row's place."""
        self.seeds[row], self.prompt[row], self.limit[row] = params.seed, prompt, limit
        self.greedy[row], self.temperature[row] = params.greedy, 1.0 if params.greedy else params.temperature
        self.plain[row] = not params.speculate
        self.repetition[row], self.minimum[row] = params.repetition_penalty, params.min_new_tokens
        self.frequency[row], self.presence[row] = params.frequency_penalty, params.presence_penalty
        self.top_k[row] = 0 if params.greedy else params.top_k
        self.top_p[row] = 1.0 if params.greedy else params.top_p
        self.min_p[row] = 0.0 if params.greedy else params.min_p
        if self._wide is not None or params.logit_bias or params.min_new_tokens:
            bias, ends = self.wide
            bias[row], ends[row] = 0.0, False
            if params.logit_bias:
                tokens, values = zip(*params.logit_bias.items(), strict=True)
                bias[row, list(tokens)] = torch.tensor(values, dtype=bias.dtype, device=bias.device)
            ends[row, sorted(params.stop_token_ids)] = True

    @property
    def wide(self) -> tuple[Tensor, Tensor]:
        if self._wide is None:
            rows, vocabulary, device = len(self.seeds), len(self.ids), self.ids.device
            self._wide = (
                torch.zeros(rows, vocabulary, device=device),
                torch.zeros(rows, vocabulary, dtype=torch.bool, device=device),
            )
        return self._wide

    def sampler(self, rows: int, simple: bool, guides: RowGrammars | None = None, keep_scores: bool = False) -> Sampler:
        """Return how the first rows draw, over these buffers. The order of the processors is transformers'.

        Args:
            rows: how many rows.
            simple: whether a temperature is all that any of them needs.
            guides: the rows' grammars, if any has one.
            keep_scores: whether a step needs the processed scores too, as rejection sampling does.
        """
        first = slice(rows)
        temperature = RowTemperature(self.temperature[first])
        processors: tuple[Processor, ...] = (temperature,)
        if not simple:
            bias, ends = self.wide
            processors = (
                RowBias(bias[first]),
                RowRepetition(self.repetition[first]),
                RowMinimum(self.minimum[first], ends[first]),
                RowPenalties(self.frequency[first], self.presence[first]),
                *([] if guides is None else [guides]),
                temperature,
                RowTopK(self.top_k[first]),
                RowTopP(self.top_p[first]),
                RowMinP(self.min_p[first]),
            )
        return Sampler(
            seeds=self.seeds[first],
            processors=processors,
            temperature=self.temperature[first],
            prompt=self.prompt[first],
            limit=self.limit[first],
            ids=self.ids,
            keep_scores=keep_scores,
            greedy=self.greedy[first],
            plain=self.plain[first],
        )

    def move(self, source: int, to: int) -> None:
        """Put a row's params in another place."""
        own = ("seeds", "prompt", "limit", "greedy", "plain", "temperature", "top_k", "top_p", "min_p")
        penalties = ("repetition", "minimum", "frequency", "presence")
        for tensor in (*(getattr(self, name) for name in (*own, *penalties)), *(self._wide or ())):
            tensor[to] = tensor[source]


@dataclass(frozen=True)
class _Buffers:
    """RunningBatch with room for texts of one width."""

    state: State
    table: Tensor


class RunningBatch:
    """What steps. sequences: by place, without gaps.

    depth: the deepest that any proposer may draft. overshoot: positions past its text that a row may touch.
    """

    def __init__(self, engine: Engine, graphs: CUDAGraphRunner, most: int, speculate: bool = True):
        self.engine, self.graphs = engine, graphs
        sizes = {bucket(rows) for rows in range(1, most + 1)}
        self._proposers: dict[int, Proposer] = {
            rows: engine.proposer_for(rows) if speculate else engine.plain for rows in sizes
        }
        self.depth = max(each.depth for each in self._proposers.values())
        self.overshoot = max(room(each) + each.scratch_slots for each in self._proposers.values())
        self.params = SamplingTensors(max(sizes), engine.target.vocab_size, engine.target.device)
        self.sequences: list[TokenSequence] = []
        self._width = 0
        self._buffers: _Buffers | None = None
        self.captured_steps: dict[tuple[int, bool, bool, bool], CapturedStep] = {}
        self._guides = RowGrammars([])

    def add(self, sequence: TokenSequence, hidden: Tensor) -> None:
        """A row whose committed tokens are in its blocks. hidden: `[F]`, of the forward that drew the pending token."""
        assert sequence.block_table is not None
        self._grow(sequence.max_length + self.overshoot)
        sequence.row = place = len(self.sequences)
        self.sequences.append(sequence)
        state, table = self._own.state, self._own.table
        state.tokens[place, : len(sequence.tokens)] = torch.tensor(sequence.tokens, device=state.tokens.device)
        state.length[place] = len(sequence.tokens) - 1
        state.hidden[place], state.active[place] = hidden, True
        self.params.write(place, sequence.params, len(sequence.prompt), sequence.max_length)
        table[place] = 0
        self.extend(sequence)

    def extend(self, sequence: TokenSequence) -> None:
        """Tell the step of a row's blocks, which may have become more."""
        assert sequence.block_table is not None and sequence.row is not None
        table = self._own.table
        blocks = sequence.block_table.blocks[: table.shape[1]]
        table[sequence.row, : len(blocks)] = torch.tensor(blocks, dtype=table.dtype, device=table.device)

    def remove(self, sequence: TokenSequence) -> None:
        """Let the last row take a row's place."""
        place, last = sequence.row, len(self.sequences) - 1
        assert place is not None
        state, table = self._own.state, self._own.table
        if place != last:
            for tensor in (state.tokens, state.length, state.hidden, table):
                tensor[place] = tensor[last]
            self.params.move(last, place)
            self.sequences[place] = self.sequences[last]
            self.sequences[place].row = place
        self.sequences.pop()
        state.active[last] = False
        state.length[last] = 0
        table[last] = 0
        sequence.row = None

    def step(self) -> tuple[StepOutput, list[list[int]]]:
        """One step of all rows, without drafts where none of them takes any. The report is by place: a row's tokens
        and, last, how many drafts were accepted."""
        rows, drafting = bucket(len(self.sequences)), any(sequence.params.speculate for sequence in self.sequences)
        simple = all(sequence.params.simple for sequence in self.sequences)
        self._guides.states[:] = [sequence.guide for sequence in self.sequences]
        key = (rows, simple, any(self._guides.states), drafting)
        if key not in self.captured_steps:
            self.captured_steps[key] = self._new(*key)
        step = self.captured_steps[key]
        step.replay()
        return step.drawn, step.read()

    def sampler_of(self, sequences: Sequence[TokenSequence]) -> Sampler:
        """For rows that are not in place yet."""
        own = SamplingTensors(len(sequences), self.engine.target.vocab_size, self.engine.target.device)
        for row, sequence in enumerate(sequences):
            own.write(row, sequence.params, len(sequence.prompt), sequence.max_length)
        guides = [sequence.guide for sequence in sequences]
        simple = all(sequence.params.simple for sequence in sequences)
        return own.sampler(len(sequences), simple, RowGrammars(guides) if any(guides) else None)

    @property
    def sizes(self) -> list[int]:
        """Numbers of rows that steps are made for, the smallest first."""
        return sorted(self._proposers)

    @property
    def nodes(self) -> int:
        """Of each row, in the next step."""
        return self._proposers[bucket(max(len(self.sequences), 1))].nodes

    @property
    def _own(self) -> _Buffers:
        assert self._buffers is not None
        return self._buffers

    def _new(self, rows: int, simple: bool, guided: bool, drafting: bool) -> CapturedStep:
        state, first = self._own.state, slice(rows)
        own = State(state.tokens[first], state.length[first], state.hidden[first], state.active[first])
        cache = PagedCache(self.graphs.store, self._own.table[first])
        proposer = self._proposers[rows] if drafting else self.engine.plain
        rejection_sampling = drafting and self.engine.rejection_sampling
        sampler = self.params.sampler(rows, simple, self._guides if guided else None, keep_scores=rejection_sampling)
        step = self.graphs.step_over(own, proposer, cache, sampler)
        if step.done is not None:
            active = own.active.clone()
            own.active.zero_()  # what is run to be captured must change nothing
            self.graphs.capture(step)
            own.active.copy_(active)
        return step

    def _grow(self, positions: int) -> None:
        """Make room for longer texts."""
        if positions <= self._width:
            return
        target, most = self.engine.target, len(self.params.seeds)
        self._width = max(NARROW[target.device.type], 1 << (positions - 1).bit_length())
        table = torch.zeros(most, self._width // BLOCK_SIZE, dtype=torch.int32, device=target.device)
        wider = _Buffers(new_state(target, most, self._width), table)
        if self._buffers is not None:
            old = self._buffers
            wider.state.tokens[:, : old.state.tokens.shape[1]] = old.state.tokens
            wider.table[:, : old.table.shape[1]] = old.table
            # What else a state holds is the same at every width.
            wider = replace(wider, state=replace(old.state, tokens=wider.state.tokens))
        self._buffers = wider
        self.captured_steps.clear()
