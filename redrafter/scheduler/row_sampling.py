"""How the rows of a running batch draw: what a batch asks for, and the rows of one call of `generate`."""

from collections.abc import Hashable, Sequence
from typing import Protocol

import torch

from redrafter.cache.to_device import to_device
from redrafter.sampling.processors import HostProcessor
from redrafter.sampling.sampler import Sampler
from redrafter.scheduler.sequence import TokenSequence


class RowSampling(Protocol):
    """Settings of the rows of a running batch, in tensors that captured steps read in place."""

    def write(self, first: int, sequences: Sequence[TokenSequence]) -> None:
        """Write the settings of sequences into the rows from `first` on."""

    def move(self, source: int, to: int) -> None:
        """Copy the settings of one row to another."""

    def kind(self, sequences: Sequence[TokenSequence]) -> Hashable:
        """Return what a captured step depends on, when these sequences are in the first rows."""

    def asks_host(self, sequences: Sequence[TokenSequence]) -> bool:
        """Tell whether a step of these sequences runs Python code of a processor, for their texts as they are then."""

    def sampler(self, rows: int, sequences: Sequence[TokenSequence], keep_scores: bool = False) -> Sampler:
        """Return a sampler of the first rows that reads their settings in place.

        Args:
            rows: How many rows.
            sequences: The sequences in them, at most as many; rows behind stand still.
            keep_scores: Whether a step needs the processed logits too, as rejection sampling does.
        """

    def load_texts(self, sequences: Sequence[TokenSequence]) -> None:
        """Take note of the texts in the first rows, for what is computed on the host in a step."""

    def sampler_of(self, sequences: Sequence[TokenSequence]) -> Sampler:
        """Return a sampler for sequences that have no rows yet, in their order."""


class CallSampling:
    """The settings of calls of `generate` that differ in nothing but numbers."""

    def __init__(self, sampler: Sampler, rows: int):
        """Make settings for `rows` rows of calls with samplers of this kind, and take on the call of `sampler`."""
        self._rows, self._call = sampler.buffers(rows), sampler

    def begin(self, sampler: Sampler) -> None:
        """Take on another call; its sampler is of the same kind."""
        self._call = sampler

    def write(self, first: int, sequences: Sequence[TokenSequence]) -> None:
        """Copy the settings of the sequences' rows in the call; see `RowSampling`."""
        last, of_call = first + len(sequences), self.sampler_of(sequences)
        for mine, theirs in zip(self._rows.tensors(), of_call.tensors(), strict=True):
            mine[first:last] = theirs

    def move(self, source: int, to: int) -> None:
        """Copy the settings of one row to another; see `RowSampling`."""
        for tensor in self._rows.tensors():
            tensor[to] = tensor[source]

    def kind(self, sequences: Sequence[TokenSequence]) -> Hashable:
        """Return what a captured step depends on: nothing, since all calls are of one kind."""
        return ()

    def asks_host(self, sequences: Sequence[TokenSequence]) -> bool:
        """Tell whether a step runs Python code of a processor; see `RowSampling`."""
        return not self._call.capturable

    def sampler(self, rows: int, sequences: Sequence[TokenSequence], keep_scores: bool = False) -> Sampler:
        """Return a sampler of the first rows that reads their settings in place; see `RowSampling`."""
        return self._rows.map(lambda tensor: tensor[:rows])

    def load_texts(self, sequences: Sequence[TokenSequence]) -> None:
        """Give the first rows what runs on the host for these sequences; see `RowSampling`."""
        for mine, of_call in zip(self._rows.processors, self._call.processors, strict=True):
            if isinstance(mine, HostProcessor) and isinstance(of_call, HostProcessor):
                mine.of_rows[:] = of_call.at([sequence.index for sequence in sequences]).of_rows

    def sampler_of(self, sequences: Sequence[TokenSequence]) -> Sampler:
        """Return a sampler for sequences that have no rows yet; see `RowSampling`."""
        rows = [sequence.index for sequence in sequences]
        return self._call.at(rows, to_device(rows, self._call.prompt.device, torch.long))
