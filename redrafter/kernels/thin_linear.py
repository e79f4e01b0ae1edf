"""The thin_linear of a linear layer, for few tokens by a kernel of its own."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from redrafter import kernels

__all__ = ["has_thin_kernel", "thin_linear"]


def has_thin_kernel(weight: Tensor) -> bool:
    """Whether `thin_linear` with this weight is ever more than the library's."""
    return kernels.TRITON and weight.is_cuda and kernels.is_supported_weight(weight)


@torch.library.custom_op("redrafter::linear", mutates_args=())
def thin_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x: `[..., D]`; weight: `[F, D]`, as `nn.Linear` has it. Returns `[..., F]`."""
    return linear(x, weight)


@thin_linear.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


if kernels.TRITON:

    @thin_linear.register_kernel("cuda")
    def _(x: Tensor, weight: Tensor) -> Tensor:
        if x.numel() // x.shape[-1] > kernels.MAX_THIN_TOKENS or not kernels.is_supported_weight(weight):
            return linear(x, weight)
        return kernels.split_k_linear(x.flatten(0, -2), weight).view(*x.shape[:-1], -1)
