"""Numbers on the host, and copies of them to a device without synchronisation."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import torch
from torch import Tensor


def made_on_host() -> AbstractContextManager[object]:
    """Return a context in which tensors made without a device are on the host.

    This is the default unless the program has called `torch.set_default_device`.
    """
    host = torch.get_default_device().type == "cpu"
    return nullcontext() if host else torch.device("cpu")  # a device context slows each call of torch a little


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which a GPU is this thread's current one: Triton and CUDA graphs use no other."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def to_device(values: Tensor | Sequence[object], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy of `values` on a device, in order with the work that was launched there before.

    A copy from pageable memory waits for all that work, so the copy is made from pinned memory, which torch keeps until
    it is done.

    Args:
        values: A tensor on the host, or numbers that `torch.tensor` takes.
        device: Where the copy goes.
        dtype: Dtype of numbers; None for the one that torch infers.
    """
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype, device="cpu")
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


MoveIndices: TypeAlias = tuple[slice | Tensor, slice | Tensor]
"""Rows that are copied, and the rows that they are copied to."""


def move_indices(source: Sequence[int], to: Sequence[int], device: torch.device) -> MoveIndices:
    """Return indices `a, b` so that `x[b] = x[a]` copies rows of a tensor on a device to as many other rows.

    They are slices where each of the two are successive rows, so that nothing is copied to the device.
    """
    first = source[0], to[0]
    if all(list(rows) == [*range(at, at + len(rows))] for rows, at in zip((source, to), first, strict=True)):
        return slice(first[0], first[0] + len(source)), slice(first[1], first[1] + len(to))
    # Both are tensors then: a slice would be a view, which may not be written to other rows of the same tensor.
    old, new = to_device([source, to], device, torch.long)
    return old, new
