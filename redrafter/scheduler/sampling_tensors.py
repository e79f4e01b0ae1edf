"""Sampling parameters of rows as tensors, which captured steps read in place."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from redrafter.cache.to_device import to_device
from redrafter.sampling.grammar_masks import RowGrammars
from redrafter.sampling.processors import (
    OfSomeRows,
    ProcessorOfRows,
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
from redrafter.scheduler.cuda_graphs import bucket
from redrafter.scheduler.sequence import SamplingParams, TokenSequence

FEW = 8  # a step that sorts the scores of few rows sorts one in so many


class Kind(NamedTuple):
    """What a captured step depends on.

    A step has the processors that one of its rows asks for, in two groups: what changes the scores of single tokens is
    computed in one pass over all rows, what cuts off unlikely tokens takes a sort, of few rows or of all. Eight kinds
    without a grammar are little enough for every one to be captured, and no row waits for a sort that nobody asked for.

    Attributes:
        greedy: Whether every row takes the likeliest token.
        edits: Whether scores of single tokens change.
        sorted_rows: Rows whose scores may be sorted: none, one in `FEW`, or all.
        guided: Whether a row follows a grammar.
    """

    greedy: bool
    edits: bool
    sorted_rows: int
    guided: bool


class SamplingTensors:
    """Sampling parameters of R rows, one tensor for each parameter: a `RowSampling` of any sequences side by side.

    Parameters of one dtype are side by side in memory, so that rows are written and moved in few launches.

    Attributes:
        seeds, prompt, limit: Seed, length of the prompt, and most tokens of the sequence, `[R]` int64.
        top_k, minimum: Tokens to sample from, and tokens before the first stop token, `[R]` int64.
        greedy, plain: Whether the row decodes greedily, and whether it verifies no drafts, `[R]` bool.
        temperature, repetition, frequency, presence, min_p: `[R]` float32.
        top_p: Probability that sampling keeps, `[R]` float64, as transformers counts it.
        ids: All token ids, `[V]` int64.
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device, ids: Tensor | None = None):
        """Make tensors of parameters that mean nothing before they are written.

        Args:
            rows: R.
            vocabulary: V.
            device: Where the tensors are.
            ids: `arange(V)` on the device, if there is one already.
        """
        with device:
            self._integers, self._floats = torch.zeros(5, rows, dtype=torch.long), torch.ones(5, rows)
            self._flags, self._doubles = torch.zeros(2, rows, dtype=torch.bool), torch.ones(1, rows, dtype=torch.double)
            self.ids = torch.arange(vocabulary) if ids is None else ids
        self.seeds, self.prompt, self.limit, self.top_k, self.minimum = self._integers
        self.greedy, self.plain = self._flags
        self.temperature, self.repetition, self.frequency, self.presence, self.min_p = self._floats
        [self.top_p] = self._doubles
        self._grammars = RowGrammars([])
        self._cut_rows: list[int] = []
        self._cut_index = torch.zeros(rows, dtype=torch.long, device=device)  # the same, where steps look for it
        self._bias_and_stops: tuple[Tensor, Tensor] | None = None  # as large as the logits: made when first needed

    @property
    def bias_and_stops(self) -> tuple[Tensor, Tensor]:
        """Logit bias `[R, V]` float32, and whether a token ends the sequence, `[R, V]` bool."""
        if self._bias_and_stops is None:
            rows, vocabulary, device = len(self.seeds), len(self.ids), self.ids.device
            self._bias_and_stops = (
                torch.zeros(rows, vocabulary, device=device),
                torch.zeros(rows, vocabulary, dtype=torch.bool, device=device),
            )
        return self._bias_and_stops

    def write(self, first: int, sequences: Sequence[TokenSequence]) -> None:
        """Write the parameters of sequences into the rows from `first` on; see `RowSampling`."""
        rows, device = slice(first, first + len(sequences)), self.ids.device
        integers, doubles = zip(*map(_numbers, sequences), strict=True)
        whole = to_device(integers, device, torch.long).T  # [7, R']
        real = to_device(doubles, device, torch.double).T  # [6, R']
        self._integers[:, rows], self._flags[:, rows] = whole[:5], whole[5:].bool()
        self._floats[:, rows], self._doubles[:, rows] = real[:5].float(), real[5:]
        for row, sequence in enumerate(sequences, start=first):
            params = sequence.params
            if self._bias_and_stops is not None or params.logit_bias or params.min_new_tokens:
                self._write_bias_and_stops(row, params)

    def _write_bias_and_stops(self, row: int, params: SamplingParams) -> None:
        bias, stops = self.bias_and_stops
        bias[row], stops[row] = 0.0, False
        if params.logit_bias:
            tokens, values = zip(*params.logit_bias.items(), strict=True)
            bias[row, to_device(tokens, bias.device)] = to_device(values, bias.device, bias.dtype)
        stops[row, to_device(sorted(params.stop_token_ids), stops.device, torch.long)] = True

    def move(self, source: int, to: int) -> None:
        """Copy the parameters of one row to another."""
        for tensor in (self._integers, self._flags, self._floats, self._doubles):
            tensor[:, to] = tensor[:, source]
        for tensor in self._bias_and_stops or ():
            tensor[to] = tensor[source]

    def kind(self, sequences: Sequence[TokenSequence]) -> Kind:
        """Return what the sampler of these rows depends on; see `RowSampling`."""
        params = [sequence.params for sequence in sequences]
        rows, cut = bucket(len(params)), sum(each.cuts for each in params)
        sorted_rows = rows if cut > rows // FEW else rows // FEW * bool(cut)
        greedy, edits = all(each.greedy for each in params), any(each.edits for each in params)
        return Kind(greedy, edits, sorted_rows, self.asks_host(sequences))

    def asks_host(self, sequences: Sequence[TokenSequence]) -> bool:
        """Tell whether one of these sequences follows a grammar; see `RowSampling`."""
        return any(sequence.guide is not None for sequence in sequences)

    def sampler(self, rows: int, sequences: Sequence[TokenSequence], keep_scores: bool = False) -> Sampler:
        """Return a sampler of the first rows that reads these tensors in place; see `RowSampling`.

        The processors have the order of those of transformers.
        """
        greedy, edits, sorted_rows, guided = self.kind(sequences)
        self.load_texts(sequences)
        first = slice(rows)
        processors: list[ProcessorOfRows] = []
        if edits:
            bias, stops = self.bias_and_stops
            processors += [
                RowBias(bias[first]),
                RowRepetition(self.repetition[first]),
                RowMinimum(self.minimum[first], stops[first]),
                RowPenalties(self.frequency[first], self.presence[first]),
            ]
        if guided:
            processors.append(self._grammars)
        if not greedy:
            processors.append(RowTemperature(self.temperature[first]))
        if sorted_rows:
            top_k, top_p, min_p = self.top_k[first], self.top_p[first], RowMinP(self.min_p[first])
            # A captured step sorts once for both. A CPU sorts for top-p alone, as it can look how many top-k needs.
            on_gpu = top_k.is_cuda
            cuts = (RowTopP(top_p, top_k), min_p) if on_gpu else (RowTopK(top_k), RowTopP(top_p), min_p)
            few = sorted_rows < rows
            processors += [OfSomeRows(self._cut_index[:sorted_rows], cuts)] if few else cuts
        return Sampler(
            seeds=None if greedy else self.seeds[first],
            processors=tuple(processors),
            temperature=self.temperature[first],
            prompt=self.prompt[first],
            limit=self.limit[first],
            ids=self.ids,
            keep_scores=keep_scores,
            greedy=None if greedy else self.greedy[first],
            plain=self.plain[first],
        )

    def load_texts(self, sequences: Sequence[TokenSequence]) -> None:
        """Let the grammars of the first rows go on from the texts of these sequences, and note which rows are cut."""
        self._grammars.of_rows[:] = [sequence.guide for sequence in sequences]
        cut = [row for row, sequence in enumerate(sequences) if sequence.params.cuts]
        if cut and cut != self._cut_rows:  # where few rows are sorted, the first one fills the places that are left
            self._cut_rows = cut
            self._cut_index.copy_(to_device(cut + cut[:1] * (len(self.seeds) - len(cut)), self.ids.device, torch.long))

    def sampler_of(self, sequences: Sequence[TokenSequence]) -> Sampler:
        """Return a sampler for sequences that have no rows yet, in their order; see `RowSampling`."""
        tensors = SamplingTensors(len(sequences), len(self.ids), self.ids.device, self.ids)
        tensors.write(0, sequences)
        return tensors.sampler(len(sequences), sequences)


def _numbers(sequence: TokenSequence) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the parameters of a sequence in the order of the tensors: integers with flags, then all others."""
    params = sequence.params
    greedy = params.greedy
    integers = (
        params.seed,
        len(sequence.prompt),
        sequence.max_length,
        0 if greedy else params.top_k,
        params.min_new_tokens,
        greedy,
        not params.speculate,
    )
    doubles = (
        1.0 if greedy else params.temperature,
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
        0.0 if greedy else params.min_p,
        1.0 if greedy else params.top_p,
    )
    return integers, doubles
