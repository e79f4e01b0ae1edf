"""Copies of numbers from the host to a device that make neither of the two wait."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["to_device"]


def to_device(values: Tensor | Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy of `values` on a device, behind the work that was launched there before.

    A copy from ordinary memory waits for all that work, so the copy is made from pinned memory, which torch keeps until
    the copy has been made.

    Args:
        values: A tensor on the host, or numbers that `torch.tensor` takes.
        device: Where the copy goes.
        dtype: Dtype of numbers; None for what torch makes of them.
    """
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
