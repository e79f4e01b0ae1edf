"""The operator for linear layers that often see few tokens: a kernel for those, torch's product otherwise."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from redrafter import kernels

__all__ = ["has_thin_kernel", "thin_linear"]


def has_thin_kernel(weight: Tensor) -> bool:
    """Return whether `thin_linear` has a kernel for few tokens with this weight `[F, D]`."""
    return kernels.TRITON and weight.is_cuda and kernels.is_supported_weight(weight)


@torch.library.custom_op("redrafter::linear", mutates_args=())
def thin_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x @ weight.T`, `[..., F]`.

    Args:
        x: Inputs, `[..., D]`.
        weight: Weight as `nn.Linear` has it, `[F, D]`.
    """
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
