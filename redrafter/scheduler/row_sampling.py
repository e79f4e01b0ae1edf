"""How the rows of a running batch draw: what a batch asks for, and the rows of one call of `generate`."""

from collections.abc import Hashable, Sequence
from typing import Protocol

import torch

from redrafter.cache.to_device import to_device
from redrafter.sampling.sampler import Sampler
from redrafter.scheduler.sequence import TokenSequence

__all__ = ["CallSampling", "RowSampling"]


class RowSampling(Protocol):
    """Settings of the rows of a running batch, in tensors that captured steps read in place.

    Attributes:
        movable: Whether rows may change their places, begin later than others and end before them.
    """

    movable: bool

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
    """The settings of calls of `generate` that differ in nothing but numbers.

    A call whose processors hold more than tensors by row is the only one, and its rows stay where they are.

    Attributes:
        movable: Whether every processor holds tensors by row and nothing else.
    """

    def __init__(self, sampler: Sampler, rows: int):
        """Make settings for `rows` rows of calls with samplers of this kind, and take on the call of `sampler`."""
        self.movable = sampler.by_row
        self._rows = sampler.buffers(rows) if self.movable else sampler
        self._call = sampler

    def begin(self, sampler: Sampler) -> None:
        """Take on another call; its sampler is of the same kind."""
        self._call = sampler

    def write(self, first: int, sequences: Sequence[TokenSequence]) -> None:
        """Copy the settings of the sequences' rows in the call; see `RowSampling`."""
        if self.movable:
            last, index = first + len(sequences), self._index(sequences)
            for mine, theirs in zip(self._rows.tensors(), self._call.tensors(), strict=True):
                mine[first:last] = theirs.index_select(0, index)

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
        return self._rows.map(lambda tensor: tensor[:rows]) if self.movable else self._rows

    def load_texts(self, sequences: Sequence[TokenSequence]) -> None:
        """Do nothing, since a call's grammars follow their rows by themselves; see `RowSampling`."""

    def sampler_of(self, sequences: Sequence[TokenSequence]) -> Sampler:
        """Return a sampler for sequences that have no rows yet; see `RowSampling`."""
        return self._call.at(self._index(sequences)) if self.movable else self._call

    def _index(self, sequences: Sequence[TokenSequence]) -> torch.Tensor:
        return to_device([sequence.index for sequence in sequences], self._call.prompt.device, torch.long)
