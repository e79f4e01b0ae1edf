"""The operator for linear layers with grouped weights of 4 and 8 bits.

Weights are the numbers of `GroupedWeight`, inputs are not quantised, and sums are in float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.nn.functional import linear

from redrafter import kernels
from redrafter.kernels.cpu import grouped_product
from redrafter.kernels.grouped_weight import GroupedWeight

_IN_ONE_ORDER: ContextVar[bool] = ContextVar("in_one_order", default=False)


@contextmanager
def in_one_order() -> Iterator[None]:
    """Have products add up in one order for any number of tokens within the context.

    Many tokens are otherwise multiplied by torch's product, which is faster.
    """
    token = _IN_ONE_ORDER.set(True)
    try:
        yield
    finally:
        _IN_ONE_ORDER.reset(token)


@torch.library.custom_op("redrafter::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias`, `[..., F]`, in the dtype of `x`.

    Args:
        x: Inputs, `[..., D]`.
        codes: Codes of the weight, as in `GroupedWeight`.
        scale: Scale of each group, `[F, G]`.
        minimum: Minimum of each group, `[F, G]`; None as in `GroupedWeight`.
        bias: Bias, `[F]`; None for none.
    """
    return widened_linear(x, codes, scale, minimum, bias)


@grouped_linear.register_fake
def _(x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor | None, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], codes.shape[0])


def widened_linear(x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return what `grouped_linear` does, by torch's product with the dequantised weight."""
    weight = GroupedWeight(codes, scale, minimum).dequantize(x.dtype)
    return linear(x, weight, None if bias is None else bias.to(x.dtype))


def _multiply_on_cpu(x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor | None, bias: Tensor | None) -> Tensor:
    most, inner = grouped_product.MAX_FEW_TOKENS, x.shape[-1]
    if _IN_ONE_ORDER.get() and x.numel() > most * inner:
        parts = [_multiply_on_cpu(part, codes, scale, minimum, bias) for part in x.reshape(-1, inner).split(most)]
        return torch.cat(parts).view(*x.shape[:-1], -1)
    product = grouped_product.multiply(x, codes, scale, minimum, bias)
    return widened_linear(x, codes, scale, minimum, bias) if product is None else product


def multiply_grouped(x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return what `grouped_linear` does, on a CPU without its dispatch, which takes as long as a small product."""
    if type(x) is Tensor and x.is_cpu and not x.requires_grad and not torch.compiler.is_compiling():
        return _multiply_on_cpu(x, codes, scale, minimum, bias)
    product: Tensor = grouped_linear(x, codes, scale, minimum, bias)
    return product


grouped_linear.register_kernel("cpu")(_multiply_on_cpu)


def is_fast(device: torch.device | str) -> bool:
    """Return whether there is a kernel for products of grouped weights on a device.

    Without one, each product dequantises the weight, which takes longer than to read an ordinary one.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return grouped_product.find_kernel() is not None
    return device.type == "cuda" and kernels.TRITON and kernels.cuda.grouped_product.is_available(device)


if kernels.TRITON:

    @grouped_linear.register_kernel("cuda")
    def _(x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor | None, bias: Tensor | None) -> Tensor:
        flat, few = x.reshape(-1, x.shape[-1]), kernels.cuda.grouped_product
        weight = GroupedWeight(codes, scale, minimum)
        if (len(flat) <= few.MAX_FEW_TOKENS or _IN_ONE_ORDER.get()) and few.is_available(x.device):
            out = few.multiply(flat, weight, bias)
        else:
            wide = kernels.widen_groups.widen_grouped(weight, x.dtype)
            out = linear(flat, wide, None if bias is None else bias.to(x.dtype))
        return out.view(*x.shape[:-1], len(codes))
