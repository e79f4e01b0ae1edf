"""Inputs of FP8 products: each token rounded to FP8 (e4m3) with its own scale.

This is the reference of the kernels in `float8_rounding`, which use the same constants.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Powers of two are handled as the bits of their exponents; products with them are exact. Adding `DOUBLE` to the bits of
# a float32 doubles it, and the bits of `2.0**n` are `ONE + n * DOUBLE`.
DOUBLE = 1 << 23
ONE = 127 * DOUBLE
EXPONENT = 0xFF * DOUBLE
BELOW_NEXT = 0x1FFFFF  # added to 1.75 (from 448, the largest FP8 number), the largest increment that does not carry
LEAST_NORMAL = 6 * DOUBLE  # distance of the smallest normal FP8 number, 2.0**-6, below 1
LARGEST_POWER = 8 * DOUBLE  # distance of the largest power of two in FP8, 2.0**8, above 1
MANTISSA = 3 * DOUBLE  # distance of the spacing of FP8 numbers below their power of two
LEAST_SCALE = ONE - 117 * DOUBLE  # at which the smallest FP8 number, 2.0**-9, has an inverse in float32


class RoundedInputs(NamedTuple):
    """The inputs of a product, rounded to FP8.

    Attributes:
        values: The rounded numbers, in the inputs' dtype, `[..., D]`.
        scale: The scale of each token, a power of two, `[..., 1]` float32; a value divided by it is an FP8 number.
    """

    values: Tensor
    scale: Tensor


def round_inputs(x: Tensor) -> RoundedInputs:
    """Round each token to FP8 numbers, with the smallest scale at which its largest number is representable.

    Args:
        x: Inputs, `[..., D]` float32, bfloat16 or float16.
    """
    largest = largest_input(x.dtype)
    wide = x.float().clamp(-largest, largest)
    bits = wide.abs().amax(dim=-1, keepdim=True).view(torch.int32)
    scale = (((bits + BELOW_NEXT) & EXPONENT) - LARGEST_POWER).clamp(min=LEAST_SCALE)
    # Below the smallest normal number the spacing is constant.
    power = (wide.view(torch.int32) & EXPONENT).maximum(scale - LEAST_NORMAL)
    unit = power - MANTISSA  # spacing of the FP8 numbers around each input
    inverse = 2 * ONE - unit
    values = (wide * inverse.view(torch.float32)).round() * unit.view(torch.float32)
    return RoundedInputs(values.to(x.dtype), scale.view(torch.float32))


def largest_input(dtype: torch.dtype) -> float:
    """Return the largest number of a dtype with a mantissa of three bits, to which larger inputs are clamped."""
    return 1.875 * 2.0 ** (15 if dtype == torch.float16 else 127)
