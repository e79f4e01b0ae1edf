"""Functions of single numbers on a CPU, with the same instructions for every number of a tensor."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["in_full_vectors"]

VECTOR = 64  # numbers, a multiple of what torch computes at once on any CPU and in any dtype
CHUNK = 16384  # numbers; a tensor of 32,768 or more is shared out to threads, at places that depend on its size


def in_full_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return `function(x)` for a function of single numbers, `[...]`, such that each depends on its argument alone.

    On a CPU torch computes a tensor in vectors of 8 to 64 numbers, and what is left over at its end with other
    instructions, by which a sigmoid in float32 may end in another bit. Here nothing is ever left over.

    Args:
        function: Computes each number of its result from one number of its argument.
        x: The argument, `[...]`.
    """
    chunks = pad(x.reshape(-1), (0, -x.numel() % VECTOR)).split(CHUNK)
    return torch.cat([function(chunk.clone()) for chunk in chunks])[: x.numel()].view(x.shape)
