"""The product of a linear layer, for few tokens by a kernel of its own."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from redrafter import kernels

__all__ = ["is_thin", "product"]


def is_thin(weight: Tensor) -> bool:
    """Whether `product` with this weight is ever more than the library's."""
    return kernels.TRITON and weight.is_cuda and kernels.suits(weight)


@torch.library.custom_op("redrafter::linear", mutates_args=())
def product(x: Tensor, weight: Tensor) -> Tensor:
    """x: `[..., D]`; weight: `[F, D]`, as `nn.Linear` has it. Returns `[..., F]`."""
    return linear(x, weight)


@product.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


if kernels.TRITON:

    @product.register_kernel("cuda")
    def _(x: Tensor, weight: Tensor) -> Tensor:
        if x.numel() // x.shape[-1] > kernels.MOST_TOKENS or not kernels.suits(weight):
            return linear(x, weight)
        return kernels.thin_linear(x.flatten(0, -2), weight).view(*x.shape[:-1], -1)
