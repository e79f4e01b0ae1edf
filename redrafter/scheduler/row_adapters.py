"""Which adapter each row of a running batch has, in a tensor that captured steps read in place."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from redrafter.cache.to_device import to_device
from redrafter.scheduler.sequence import TokenSequence


def slot_of(sequence: TokenSequence) -> int:
    """Return the slot of a sequence's adapter, 0 for none."""
    return 0 if sequence.adapter is None else sequence.adapter.slot


def any_adapter(sequences: Iterable[TokenSequence]) -> bool:
    """Tell whether one of these sequences has an adapter."""
    return any(sequence.adapter is not None for sequence in sequences)


def adapters_of(sequences: Sequence[TokenSequence], device: torch.device) -> Tensor | None:
    """Return the slot of each sequence's adapter, `[B]` int64; None where none has one."""
    return to_device([*map(slot_of, sequences)], device, torch.long) if any_adapter(sequences) else None


class RowAdapters:
    """The slots of the adapters of R rows."""

    def __init__(self, rows: int, device: torch.device):
        """Begin with rows of the model alone."""
        self._slots = torch.zeros(rows, dtype=torch.long, device=device)

    def write(self, first: int, sequences: Sequence[TokenSequence]) -> None:
        """Write the slots of sequences into the rows from `first` on."""
        slots = to_device([*map(slot_of, sequences)], self._slots.device, torch.long)
        self._slots[first : first + len(sequences)] = slots

    def move(self, source: int, to: int) -> None:
        """Copy the slot of one row to another."""
        self._slots[to] = self._slots[source]

    def first(self, rows: int) -> Tensor:
        """Return the slots of the first rows, `[rows]` int64, which share memory with those that are written."""
        return self._slots[:rows]
