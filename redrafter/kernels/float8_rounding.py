"""Inputs of FP8 products, rounded to FP8 (e4m3) token by token; `float8_inputs` is the reference, bit for bit.

One program reads a whole token, finds its scale, and writes only what the product reads: the rounded numbers in the
inputs' dtype, or FP8 numbers and the scale.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels import float8_inputs
from redrafter.kernels.launch import supports_dependent_launch

MAX_ROUNDED_WIDTH = 32768  # features of a token that one program holds in registers
FEATURES_PER_WARP = 1024
MIN_WARPS, MAX_WARPS = 4, 16

ONE, EXPONENT = tl.constexpr(float8_inputs.ONE), tl.constexpr(float8_inputs.EXPONENT)
BELOW_NEXT, LEAST_SCALE = tl.constexpr(float8_inputs.BELOW_NEXT), tl.constexpr(float8_inputs.LEAST_SCALE)
LEAST_NORMAL, LARGEST_POWER = tl.constexpr(float8_inputs.LEAST_NORMAL), tl.constexpr(float8_inputs.LARGEST_POWER)
MANTISSA = tl.constexpr(float8_inputs.MANTISSA)
NO_FRACTIONS = tl.constexpr(1.5 * 2.0**23)  # around which float32 has only integers
SIGN = tl.constexpr(-(1 << 31))
SIZE = tl.constexpr(0x7FFF)  # the 16 bits without the sign: integers in the order of the absolute values


@triton.jit
def _cut(x, LARGEST: tl.constexpr):
    """Return absolute values in float32, clamped to `LARGEST`; NaN stays NaN."""
    return tl.minimum(tl.abs(x.to(tl.float32)), LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _round_kernel(
    X, OUT, SCALE, inner,
    LARGEST: tl.constexpr, NARROW: tl.constexpr, WIDTH: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    """Round one token to FP8 numbers; if `NARROW`, store them divided by the scale, and the scale.

    `LARGEST` is the result of `largest_input` for the dtype. `FOLLOW` is set if the kernel may be launched before the
    previous one is done (programmatic dependent launch) and must wait for it before it reads `X`.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, WIDTH)
    if FOLLOW:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # the product prefetches its weight while this one runs
    given = tl.load(X + row * inner + k, k < inner, 0.0)  # until the scale is known, registers hold 16 bits per number
    # Compared as integers: without the sign bit, they have the order of the numbers.
    largest = tl.max((given.to(tl.int16, bitcast=True) & SIZE).to(tl.int32), 0).to(tl.int16)
    largest = _cut(largest.to(given.dtype, bitcast=True), LARGEST).to(tl.int32, bitcast=True)
    scale = tl.maximum(((largest + BELOW_NEXT) & EXPONENT) - LARGEST_POWER, LEAST_SCALE)
    size = _cut(given, LARGEST)
    unit = tl.maximum(size.to(tl.int32, bitcast=True) & EXPONENT, scale - LEAST_NORMAL) - MANTISSA
    inverse = 2 * ONE - unit
    # Adding and subtracting 1.5 * 2**23 rounds to the nearest even integer, as float32 has no fractions there.
    units = (size * inverse.to(tl.float32, bitcast=True) + NO_FRACTIONS) - NO_FRACTIONS
    if NARROW:
        unit += ONE - scale
        tl.store(SCALE + row, scale.to(tl.float32, bitcast=True))
    rounded = (units * unit.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    rounded |= given.to(tl.float32).to(tl.int32, bitcast=True) & SIGN
    tl.store(OUT + row * inner + k, rounded.to(tl.float32, bitcast=True).to(OUT.dtype.element_ty), k < inner)


def round_values(x: Tensor) -> Tensor:
    """Round each token to FP8 numbers, with the smallest scale at which its largest number is representable.

    Args:
        x: Inputs, `[..., D]` bfloat16 or float16, with at most `MAX_ROUNDED_WIDTH` features.

    Returns:
        The rounded numbers, in the inputs' dtype, `[..., D]`.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _round(x, out, None)
    return out


def round_to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each token as `round_values` does, to FP8 itself.

    Args:
        x: Inputs, as in `round_values`.

    Returns:
        The rounded numbers divided by the scale of their token, `[..., D]` float8_e4m3fn, and the scales, which are
        powers of two, `[..., 1]` float32.
    """
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    _round(x, out, scale)
    return out, scale


def _round(x: Tensor, out: Tensor, scale: Tensor | None) -> None:
    """Write rounded inputs to `out`; if `scale` is given, divided by the scales, which are written to it."""
    if not x.numel():
        return
    inner = x.shape[-1]
    width, follow = triton.next_power_of_2(inner), supports_dependent_launch(x.device)
    _round_kernel[(x.numel() // inner,)](
        x.contiguous(), out, scale, inner,
        LARGEST=float8_inputs.largest_input(x.dtype), NARROW=scale is not None, WIDTH=width,
        FOLLOW=follow, launch_pdl=follow, num_warps=min(max(width // FEATURES_PER_WARP, MIN_WARPS), MAX_WARPS),
    )  # fmt: skip
