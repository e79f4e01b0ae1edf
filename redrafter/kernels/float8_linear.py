"""The operator for linear layers whose weight is FP8 (e4m3): a kernel for few tokens, else torch's product."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from redrafter import kernels

__all__ = ["float8_linear"]

_HALF = (torch.bfloat16, torch.float16)


@torch.library.custom_op("redrafter::float8_linear", mutates_args=())
def float8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ (weight * scale).T + bias`, `[..., F]`. Inputs are not rounded.

    Args:
        x: Inputs, `[..., D]`.
        weight: Weight as `nn.Linear` has it, `[F, D]` float8_e4m3fn; rows may be apart.
        scale: What each row of it is multiplied by, `[F]` float32.
        bias: Bias, `[F]`; None for none.
    """
    return _widened(x, weight, scale, bias)


@float8_linear.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _widened(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product by torch, with a weight that is widened first."""
    wide = (weight.float() * scale[:, None]).to(x.dtype)
    return linear(x, wide, None if bias is None else bias.to(x.dtype))


if kernels.TRITON:

    @float8_linear.register_kernel("cuda")
    def _(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        if x.dtype not in _HALF:
            return _widened(x, weight, scale, bias)
        if x.numel() // x.shape[-1] > kernels.MAX_FLOAT8_TOKENS:
            return linear(x, kernels.widen_float8(weight, scale, x.dtype), bias)
        product = kernels.float8_product(x.reshape(-1, x.shape[-1]), weight, scale, bias)
        return product.view(*x.shape[:-1], len(weight))
