"""The operators for linear layers: kernels for few tokens and for weights of FP8 (e4m3), else torch's products."""

import functools

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from redrafter import kernels
from redrafter.kernels.float8_inputs import round_inputs

MAX_FEW_TOKENS = 32  # for more tokens, products whose inputs are FP8 too take less time

_HALF = (torch.bfloat16, torch.float16)


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
    """Return `x @ (weight * scale).T + bias`, `[..., F]`. Inputs are not rounded.

    Args:
        x: Inputs, `[..., D]`.
        weight: Weight as `nn.Linear` has it, `[F, D]` float8_e4m3fn; rows may be apart.
        scale: What each row of it is multiplied by, `[F]` float32.
        bias: Bias, `[F]`; None for none.
    """
    return _widened(x, weight, scale, bias)


@torch.library.custom_op("redrafter::rounded_float8_linear", mutates_args=())
def rounded_float8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return what `float8_linear` does, of inputs whose tokens are rounded to FP8, each by itself."""
    return _widened(round_inputs(x).values, weight, scale, bias)


@float8_linear.register_fake
@rounded_float8_linear.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _widened(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    wide = (weight.float() * scale[:, None]).to(x.dtype)
    return linear(x, wide, None if bias is None else bias.to(x.dtype))


def _product(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product on a GPU, with a weight that is widened in registers or first, by the number of tokens."""
    if x.dtype not in _HALF:
        return _widened(x, weight, scale, bias)
    if x.numel() // x.shape[-1] > kernels.MAX_FLOAT8_TOKENS:
        return linear(x, kernels.widen_float8(weight, scale, x.dtype), bias)
    product = kernels.float8_product(x.reshape(-1, x.shape[-1]), weight, scale, bias)
    return product.view(*x.shape[:-1], len(weight))


def _has_scaled_product(x: Tensor, weight: Tensor) -> bool:
    """Tell whether to multiply in FP8: there are many tokens, and `torch._scaled_mm` takes them with scales of rows."""
    return (
        x.numel() // x.shape[-1] > MAX_FEW_TOKENS
        and x.dtype == torch.bfloat16
        and weight.is_contiguous()
        and not any(size % 16 for size in weight.shape)
        and _multiplies_float8(x.device)
    )


@functools.cache
def _multiplies_float8(device: torch.device) -> bool:
    """Tell whether `torch._scaled_mm` multiplies FP8 with scales of rows on a GPU."""
    return torch.cuda.get_device_capability(device) in ((8, 9), (9, 0))


def _scaled_product(narrow: Tensor, narrow_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product of a weight and inputs that are both FP8, the latter divided by scales `[..., 1]`."""
    out = torch._scaled_mm(  # noqa: SLF001 -- torch's public function is newer than the oldest torch
        narrow.view(-1, narrow.shape[-1]),
        weight.t(),
        scale_a=narrow_scale.view(-1, 1),
        scale_b=scale[None],
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    ).view(*narrow.shape[:-1], len(weight))
    return out if bias is None else out + bias


if kernels.TRITON:

    @thin_linear.register_kernel("cuda")
    def _(x: Tensor, weight: Tensor) -> Tensor:
        if x.numel() // x.shape[-1] > kernels.MAX_THIN_TOKENS or not kernels.is_supported_weight(weight):
            return linear(x, weight)
        return kernels.split_k_linear(x.flatten(0, -2), weight).view(*x.shape[:-1], -1)

    @residual_layer.register_kernel("cuda")
    def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if x.numel() // x.shape[-1] > kernels.MAX_THIN_TOKENS or not kernels.is_supported_weight(weight):
            return x + silu(linear(x, weight, bias))
        return kernels.split_k_linear(x.flatten(0, -2), weight, bias, residual=True).view(x.shape)

    @float8_linear.register_kernel("cuda")
    def _(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        return _product(x, weight, scale, bias)

    @rounded_float8_linear.register_kernel("cuda")
    def _(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        if x.dtype not in _HALF or x.shape[-1] > kernels.MAX_ROUNDED_WIDTH:
            return _product(round_inputs(x).values, weight, scale, bias)
        if _has_scaled_product(x, weight):
            return _scaled_product(*kernels.round_to_float8(x), weight, scale, bias)
        return _product(kernels.round_values(x), weight, scale, bias)
