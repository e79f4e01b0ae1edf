"""Find out, by comparing bits, whether torch's matrix product sums in the order of `ordered_linear`.

A library of matrix products chooses a kernel by the shape. Most of these sum as `ordered_linear` does, over all input
features in ascending order; the others cut a long sum into parts.
"""

import torch
from torch import Tensor

from redrafter.kernels.ordered_linear import ordered_linear

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
    """Compare the two products of sums of which only rounding is left, and with a bias those of random numbers."""
    try:
        inputs, weights = _cancelling(x, weight)
        if bias is None:
            return _same_bits(inputs, weights, None)
        return _same_bits(inputs, weights, torch.zeros_like(bias)) and _same_bits(_random(x), weights, _random(bias))
    except torch.cuda.OutOfMemoryError:
        return False


def _same_bits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    ours, theirs = ordered_linear(x, weight, bias), torch_linear(x, weight, bias)
    return bool(ours.any()) and torch.equal(ours, theirs)


def _random(like: Tensor) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(like.numel())
    return torch.empty_like(like).normal_(generator=generator)


def _cancelling(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return random inputs and a weight of these shapes, whose second half takes away what the first one gives.

    Only rounding is left of such sums, so that almost every one of them shows another order.
    """
    x, weight, half = _random(x), _random(weight), x.shape[1] // 2
    x[:, half : 2 * half], weight[:, half : 2 * half] = -x[:, :half], weight[:, :half]
    x[:, 2 * half :] = 0
    return x, weight
