"""The slots of the adapters that sequences have."""

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
