"""The operator for linear layers whose weight is FP8 (e4m3): a kernel for few tokens, else torch's products."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from redrafter import kernels
from redrafter.kernels.float8_inputs import round_inputs

__all__ = ["float8_linear", "rounded_float8_linear"]

_HALF = (torch.bfloat16, torch.float16)


@torch.library.custom_op("redrafter::float8_linear", mutates_args=())
def float8_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    narrow: Tensor | None = None,
    narrow_scale: Tensor | None = None,
) -> Tensor:
    """Return `x @ (weight * scale).T + bias`, `[..., F]`. Inputs are not rounded here.

    Args:
        x: Inputs, `[..., D]`.
        weight: Weight as `nn.Linear` has it, `[F, D]` float8_e4m3fn; rows may be apart.
        scale: What each row of it is multiplied by, `[F]` float32.
        bias: Bias, `[F]`; None for none.
        narrow: `x / narrow_scale`, `[..., D]` float8_e4m3fn, which many tokens are multiplied by; None where inputs are
            not rounded, or nothing multiplies FP8.
        narrow_scale: What each token of it is multiplied by, `[..., 1]` float32.
    """
    return _widened(x, weight, scale, bias)


@float8_linear.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    narrow: Tensor | None = None,
    narrow_scale: Tensor | None = None,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def rounded_float8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return what `float8_linear` does, of inputs whose tokens are rounded to FP8, each by itself."""
    values, narrow, narrow_scale = round_inputs(x)
    product: Tensor = float8_linear(values, weight, scale, bias, narrow, narrow_scale)
    return product


def _widened(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product by torch, with a weight that is widened first."""
    wide = (weight.float() * scale[:, None]).to(x.dtype)
    return linear(x, wide, None if bias is None else bias.to(x.dtype))


def _has_scaled_product(x: Tensor, weight: Tensor) -> bool:
    """Tell whether `torch._scaled_mm` takes a weight, with scales of rows, and writes the dtype of the inputs."""
    return x.dtype == torch.bfloat16 and weight.is_contiguous() and not any(size % 16 for size in weight.shape)


def _scaled_product(
    narrow: Tensor, narrow_scale: Tensor | None, weight: Tensor, scale: Tensor, bias: Tensor | None
) -> Tensor:
    """Return the product of inputs and weights that are both FP8, `[..., F]` bfloat16; as `float8_linear`."""
    assert narrow_scale is not None, "inputs of FP8 come with their scales"
    out = torch._scaled_mm(  # noqa: SLF001 -- torch's public function is newer than the oldest torch
        narrow.reshape(-1, narrow.shape[-1]),
        weight.t(),
        scale_a=narrow_scale.reshape(-1, 1),
        scale_b=scale[None],
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
    out = out.view(*narrow.shape[:-1], len(weight))
    return out if bias is None else out + bias


if kernels.TRITON:

    @float8_linear.register_kernel("cuda")
    def _(
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        narrow: Tensor | None = None,
        narrow_scale: Tensor | None = None,
    ) -> Tensor:
        if x.dtype not in _HALF:
            return _widened(x, weight, scale, bias)
        tokens = x.numel() // x.shape[-1]
        if narrow is not None and tokens > kernels.MAX_FEW_TOKENS and _has_scaled_product(x, weight):
            return _scaled_product(narrow, narrow_scale, weight, scale, bias)
        if tokens > kernels.MAX_FLOAT8_TOKENS:
            return linear(x, kernels.widen_float8(weight, scale, x.dtype), bias)
        product = kernels.float8_product(x.reshape(-1, x.shape[-1]), weight, scale, bias)
        return product.view(*x.shape[:-1], len(weight))
