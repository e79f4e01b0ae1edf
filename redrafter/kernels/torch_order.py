"""Find out, by comparing bits, whether torch's matrix product sums in the order of `ordered_linear`.

A library of matrix products chooses a kernel by the shape. Most of these sum as `ordered_linear` does, over all input
features in ascending order; the others cut a long sum into parts.
"""

import torch
from torch import Tensor

from redrafter.kernels.ordered_linear import ordered_linear

__all__ = ["torch_keeps_order", "torch_linear"]

OUTPUTS = 1 << 21  # numbers that are compared; of these, another order changes one in some thousands in bfloat16
MOST_TRIALS = 64

_KNOWN: dict[tuple[object, ...], bool] = {}


def torch_keeps_order(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether `torch_linear` gives the bits of `ordered_linear` for such arguments.

    The answer is found once for each shape and dtype. While a CUDA graph is being captured nothing can be found out,
    and what is not known is answered by False.

    Args:
        x: Inputs, `[T, D]`, contiguous.
        weight: Weight, `[F, D]`, contiguous.
        bias: `[F]`; None for none.
    """
    if x.data_ptr() % 16 or weight.data_ptr() % 16:
        return False
    key = (x.device, x.dtype, *x.shape, len(weight), bias is None)
    if key not in _KNOWN:
        if torch.cuda.is_current_stream_capturing():
            return False
        _KNOWN[key] = _compare(x, weight, bias)
    return _KNOWN[key]


def torch_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias` by torch's product; not by `linear`, which a batch-invariant forward replaces."""
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def _compare(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Compare the two products of random inputs, until enough numbers have been equal."""
    trials = min(-(-OUTPUTS // (len(x) * len(weight))), MOST_TRIALS)
    equal = torch.ones((), dtype=torch.bool, device=x.device)
    generator = torch.Generator(x.device).manual_seed(0)
    for _ in range(trials):
        inputs = torch.empty_like(x).normal_(generator=generator)
        ours, theirs = ordered_linear(inputs, weight, bias), torch_linear(inputs, weight, bias)
        equal &= (ours == theirs).all() & ours.any()
    return bool(equal)
