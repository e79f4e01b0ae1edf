"""Operators for linear layers and experts in which a row's result does not depend on the other rows.

A library of matrix products chooses the order of its sums by the number of rows, so a row alone and the same row among
others differ in their last bits. On a CPU these operators multiply blocks of a fixed number of rows, for which that
order is always the same. Measurements in float32, float16 and bfloat16, for widths from 5 to 8,192 and 1 and 2 threads,
showed that a row's bits then depend neither on its position in the block nor on the other rows. The order may depend on
the number of threads and on the CPU.

On a GPU every output is one sum in ascending order. torch's product is used for shapes for which it is found to sum so,
and otherwise a kernel of our own.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from redrafter import kernels

BLOCK = 16  # rows of every product
VECTOR = 64  # numbers, a multiple of torch's vector width on any CPU and in any dtype
CHUNK = 16384  # numbers; torch divides a tensor of 32,768 or more between threads, at positions that depend on its size


@torch.library.custom_op("redrafter::invariant_linear", mutates_args=())
def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias`, `[..., F]`, each row computed as it would be alone.

    Args:
        x: Inputs, `[..., D]`.
        weight: Weight in the layout of `nn.Linear`, `[F, D]`.
        bias: Bias, `[F]`; None for none.
    """
    return _in_blocks(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], len(weight))


@invariant_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("redrafter::invariant_expert_linear", mutates_args=())
def invariant_expert_linear(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    """Return the product of each row with the weight of its expert, `[R, F]`, each row computed as it would be alone.

    Args:
        x: Inputs, `[R, D]`.
        weight: Weights of E experts, `[E, F, D]`; may be a view with another order in memory.
        expert: The expert of each row, `[R]` int64.
    """
    out = x.new_empty(len(x), weight.shape[1])
    for index in expert.unique().tolist():
        rows = (expert == index).nonzero()[:, 0]
        out[rows] = _in_blocks(x[rows], weight[index], None)
    return out


@invariant_expert_linear.register_fake
def _(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _in_blocks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias`, `[R, F]`, in products of `BLOCK` rows, padding `x [R, D]` with zeros."""
    # Always 16 rows: the library chooses the order of its sums by their number.
    blocks = pad(x, (0, 0, 0, -len(x) % BLOCK)).contiguous().split(BLOCK)
    return torch.cat([linear(block, weight, bias) for block in blocks])[: len(x)]


if kernels.TRITON:
    from redrafter.kernels.ordered_linear import torch_keeps_order, torch_linear

    @invariant_linear.register_kernel("cuda")
    def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        multiply = torch_linear if torch_keeps_order(flat, weight, bias) else kernels.ordered_linear.ordered_linear
        return multiply(flat, weight, bias).view(*x.shape[:-1], -1)

    invariant_expert_linear.register_kernel("cuda")(kernels.ordered_linear.ordered_expert_linear)


def in_full_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return `function(x)` for a pointwise function, `[...]`, such that each number depends only on its argument.

    On a CPU torch computes a tensor in vectors of 8 to 64 numbers, and the remainder at its end with other
    instructions, for which a float32 sigmoid may differ in its last bit. Here there is never a remainder.

    Args:
        function: Computes each number of its result from one number of its argument.
        x: The argument, `[...]`.
    """
    chunks = pad(x.reshape(-1), (0, -x.numel() % VECTOR)).split(CHUNK)
    # Cloned, as a view into a larger tensor may be unaligned and take the other path.
    return torch.cat([function(chunk.clone()) for chunk in chunks])[: x.numel()].view(x.shape)
