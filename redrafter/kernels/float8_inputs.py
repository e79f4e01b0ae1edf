"""Inputs of FP8 products: each token rounded to FP8 (e4m3) with a scale of its own.

These are plain operators, which torch.compile fuses into the norm or the activation that writes the inputs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["RoundedInputs", "round_inputs"]

# Powers of two are handled as the bits of their exponents; products with them are exact. `_DOUBLE`, added to the bits
# of a float32, doubles it, and the bits of `2.0**n` are `(_BIAS + n) * _DOUBLE`.
_DOUBLE = 1 << 23
_EXPONENT = 0xFF * _DOUBLE
_BIAS = 127
_BELOW_NEXT = 0x1FFFFF  # added to 1.75 (of 448, the largest number of FP8), the last one that does not carry
_LEAST_EXPONENT = -6  # of a normal number of FP8
_LARGEST_EXPONENT = 8
_MANTISSA = 3

_LEAST_SCALE = -117  # at which the least number of FP8, 2.0**-9, has an inverse in float32
_LARGEST = {torch.float16: 1.875 * 2.0**15}  # with a mantissa of three bits, where it is not float32's


class RoundedInputs(NamedTuple):
    """The inputs of a product, rounded to FP8.

    Attributes:
        values: The rounded numbers, in the dtype that the inputs had, `[..., D]`.
        narrow: The same divided by the scales, `[..., D]` float8_e4m3fn; None where no product of FP8 reads it.
        scale: The scale of each token, a power of two, `[..., 1]` float32.
    """

    values: Tensor
    narrow: Tensor | None
    scale: Tensor


def round_inputs(x: Tensor) -> RoundedInputs:
    """Round each token to numbers of FP8, with the least scale at which its largest number is one.

    Args:
        x: Inputs, `[..., D]` float32, bfloat16 or float16.
    """
    largest = _LARGEST.get(x.dtype, 1.875 * 2.0**127)
    wide = x.float().clamp(-largest, largest)
    bits = wide.abs().amax(dim=-1, keepdim=True).view(torch.int32)
    scale = ((bits + _BELOW_NEXT) & _EXPONENT) - _LARGEST_EXPONENT * _DOUBLE
    scale = scale.clamp(min=(_BIAS + _LEAST_SCALE) * _DOUBLE)
    power = (wide.view(torch.int32) & _EXPONENT).maximum(scale + _LEAST_EXPONENT * _DOUBLE)
    unit = power - _MANTISSA * _DOUBLE  # distance of the numbers of FP8 about each input
    values = (wide * _inverse(unit)).round() * unit.view(torch.float32)
    narrow = (values * _inverse(scale)).to(torch.float8_e4m3fn) if _multiplies_float8(x.device) else None
    return RoundedInputs(values.to(x.dtype), narrow, scale.view(torch.float32))


def _inverse(bits: Tensor) -> Tensor:
    """Return the inverses of powers of two, whose bits these are."""
    return (2 * _BIAS * _DOUBLE - bits).view(torch.float32)


@torch.compiler.assume_constant_result
def _multiplies_float8(device: torch.device) -> bool:
    """Return whether `torch._scaled_mm` multiplies FP8 with scales of rows on a device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in ((8, 9), (9, 0))
