"""The operators for linear layers: kernels for few tokens and for weights of FP8 (e4m3), else torch's products."""

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from redrafter import kernels
from redrafter.kernels.float8_inputs import round_inputs

MAX_FEW_TOKENS = 128  # for more tokens, torch's FP8 product is as fast as our kernel

_HALF = (torch.bfloat16, torch.float16)


def has_thin_kernel(weight: Tensor) -> bool:
    """Return whether `thin_linear` has a kernel for few tokens for this weight `[F, D]`."""
    return kernels.TRITON and weight.is_cuda and kernels.linear.is_supported_weight(weight)


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


@torch.library.custom_op("redrafter::residual_layer", mutates_args=())
def residual_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return `x + SiLU(x @ weight.T + bias)`, `[..., D]`.

    Args:
        x: Inputs, `[..., D]`.
        weight: Weight as `nn.Linear` has it, `[D, D]`.
        bias: Bias, `[D]`.
    """
    return x + silu(linear(x, weight, bias))


@residual_layer.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("redrafter::float8_linear", mutates_args=())
def float8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ (weight * scale).T + bias`, `[..., F]`, of inputs rounded to FP8 token by token.

    The number of tokens selects a kernel, and changes only the order of sums.

    Args:
        x: Inputs, `[..., D]`.
        weight: Weight as `nn.Linear` has it, `[F, D]` float8_e4m3fn; rows may be apart.
        scale: Multiplier of each row of it, `[F]` float32.
        bias: Bias, `[F]`; None for none.
    """
    return _widened_by_torch(x, weight, scale, bias)


def _widened_by_torch(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    wide = (weight.float() * scale[:, None]).to(x.dtype)
    return linear(round_inputs(x).values, wide, None if bias is None else bias.to(x.dtype))


@float8_linear.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _takes_many(x: Tensor, weight: Tensor) -> bool:
    """Return whether `torch._scaled_mm` supports row scales here, and is faster, as for many tokens."""
    return (
        x.numel() // x.shape[-1] > MAX_FEW_TOKENS
        and x.dtype == torch.bfloat16
        and weight.is_contiguous()
        and not any(size % 16 for size in weight.shape)
        and kernels.launch.capability(x.device) in ((8, 9), (9, 0))
    )


def _many(narrow: Tensor, narrow_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    out = torch._scaled_mm(  # noqa: SLF001 -- torch's public function is newer than the oldest torch
        narrow,
        weight.t(),
        scale_a=narrow_scale.view(-1, 1),
        scale_b=scale[None],
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
    return out if bias is None else out + bias


def _widened(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product on a GPU without FP8 products: widened in registers or, for many tokens, before."""
    if len(x) > kernels.linear.MAX_WIDENED_TOKENS:
        return linear(x, kernels.linear.widen_float8(weight, scale, x.dtype), bias)
    return kernels.linear.widened_product(x, weight, scale, bias)


if kernels.TRITON:

    @thin_linear.register_kernel("cuda")
    def _(x: Tensor, weight: Tensor) -> Tensor:
        if x.numel() // x.shape[-1] > kernels.linear.MAX_THIN_TOKENS or not kernels.linear.is_supported_weight(weight):
            return linear(x, weight)
        return kernels.linear.split_k_linear(x.flatten(0, -2), weight).view(*x.shape[:-1], -1)

    @residual_layer.register_kernel("cuda")
    def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if x.numel() // x.shape[-1] > kernels.linear.MAX_THIN_TOKENS or not kernels.linear.is_supported_weight(weight):
            return x + silu(linear(x, weight, bias))
        return kernels.linear.split_k_linear(x.flatten(0, -2), weight, bias, residual=True).view(x.shape)

    @float8_linear.register_kernel("cuda")
    def _(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        if x.dtype not in _HALF or x.shape[-1] > kernels.float8_rounding.MAX_ROUNDED_WIDTH:
            out = _widened_by_torch(flat, weight, scale, bias)
        elif kernels.launch.capability(x.device) < (8, 9):
            out = _widened(kernels.float8_rounding.round_values(flat), weight, scale, bias)
        elif _takes_many(x, weight):
            out = _many(*kernels.float8_rounding.round_to_float8(flat), weight, scale, bias)
        else:
            out = kernels.float8_matmul.float8_product(
                *kernels.float8_rounding.round_to_float8(flat), weight, scale, bias, x.dtype
            )
        return out.view(*x.shape[:-1], len(weight))
