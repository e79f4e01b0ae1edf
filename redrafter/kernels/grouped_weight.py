"""Weights of linear layers as small integers with a scale, and perhaps a minimum, for each group of input features.

This is the one form in which weights of 4 and 8 bits are computed, whatever file they come from: GGUF, AWQ, GPTQ,
compressed-tensors, torchao, or an ordinary weight that was quantised at loading. A weight is `code * scale + minimum`
in float32, with the numbers of the file, so that its values are those that the file's own library computes. Symmetric
formats have no minima, and their codes of 4 bits are those of the numbers from -8 to 7, plus 8.

Codes of 4 bits are stored two in a byte. In each block of 32 input features, byte j has the code of feature j in its
low four bits and that of feature j + 16 in its high ones, as GGUF's Q4_0 and Q4_1 have.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

ZERO_CODE = 8  # of 4 bits, in a weight without minima
BLOCK = 32  # input features whose codes of 4 bits are in 16 bytes
HALF = BLOCK // 2


@dataclass(frozen=True)
class GroupedWeight:
    """A weight of a linear layer with F output and D input features, in groups of G input features.

    Attributes:
        codes: Two codes from 0 to 15 per byte, `[F, D / 2]` uint8, or codes from -128 to 127, `[F, D]` int8.
        scale: Scale of each group, `[F, D / G]` float16 or float32. G is a multiple of 32 for codes of 4 bits, and of
            16 for codes of 8.
        minimum: What is added in each group, in the shape of `scale`, float16 or float32; None for zeros with codes of
            8 bits, and for `-ZERO_CODE * scale` with codes of 4.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None = None

    @property
    def bits(self) -> int:
        """Bits of a code: 4 or 8."""
        return 4 if self.codes.dtype == torch.uint8 else 8

    @property
    def shape(self) -> tuple[int, int]:
        """Output and input features."""
        return len(self.codes), self.codes.shape[1] * 8 // self.bits

    @property
    def group(self) -> int:
        """Input features per group."""
        return self.shape[1] // self.scale.shape[1]

    def columns(self, columns: slice) -> "GroupedWeight":
        """Return a view of the weight of some of the input features, which are whole groups."""
        first, end, _ = columns.indices(self.shape[1])
        if end - first == self.shape[1]:
            return self
        if first % self.group or end % self.group:
            raise ValueError(f"input features {first} to {end} are not whole groups of {self.group}")
        groups = slice(first // self.group, end // self.group)
        codes = self.codes[:, first * self.bits // 8 : end * self.bits // 8]
        return GroupedWeight(codes, self.scale[:, groups], None if self.minimum is None else self.minimum[:, groups])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight, `[F, D]`: computed in float32, then rounded to `dtype`."""
        codes = unpack_codes(self.codes) if self.bits == 4 else self.codes
        wide = codes.unflatten(1, (-1, self.group)).float()
        if self.minimum is None and self.bits == 4:
            wide -= ZERO_CODE
        wide *= self.scale.float()[:, :, None]
        if self.minimum is not None:
            wide += self.minimum.float()[:, :, None]
        return wide.flatten(1).to(dtype)


def join_rows(parts: Sequence[GroupedWeight]) -> GroupedWeight:
    """Return the weight whose output features are those of all parts, which have the same bits and groups."""
    minima = [part.minimum for part in parts if part.minimum is not None]
    return GroupedWeight(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scale for part in parts]),
        torch.cat(minima) if minima else None,
    )


def pack_codes(codes: Tensor) -> Tensor:
    """Return codes from 0 to 15, `[F, D]` with D a multiple of 32, as two in each byte, `[F, D / 2]` uint8."""
    low, high = rearrange(codes.to(torch.uint8), "f (b half j) -> half f (b j)", half=2, j=HALF)
    return low | high << 4


def unpack_codes(packed: Tensor) -> Tensor:
    """Return the codes that `pack_codes` has packed, `[F, D]` uint8."""
    return rearrange([packed & 15, packed >> 4], "half f (b j) -> f (b half j)", j=HALF)


def narrowest(numbers: Tensor) -> Tensor:
    """Return numbers as float16 if that changes none of them, else as float32."""
    narrow = numbers.half()
    return narrow if torch.equal(narrow.float(), numbers.float()) else numbers.float()


def quantize_groups(weight: Tensor, bits: int, group: int = BLOCK) -> GroupedWeight:
    """Quantise a weight `[F, D]` to the nearest code, group by group.

    Codes of 4 bits reach from the smallest to the largest number of a group; codes of 8 bits have no minimum, and a
    scale by the largest absolute number. Scales and minima are float16, or float32 where float16 would overflow
    or underflow.
    """
    grouped = rearrange(weight.float(), "f (g n) -> f g n", n=group)
    least, most = grouped.aminmax(dim=2)
    minimum = _float16_or_wider(least) if bits == 4 else None
    span = most - least if bits == 4 else torch.maximum(most.abs(), least.abs())
    scale = _float16_or_wider(span / (15 if bits == 4 else 127))
    steps = (grouped - (0 if minimum is None else minimum.float()[:, :, None])) / scale.float()[:, :, None]
    codes = steps.nan_to_num(0).round()  # 0 / 0 in a group of equal numbers
    if bits == 4:
        return GroupedWeight(pack_codes(codes.clamp(0, 15).flatten(1)), scale, minimum)
    return GroupedWeight(codes.clamp(-127, 127).to(torch.int8).flatten(1), scale)


def _float16_or_wider(numbers: Tensor) -> Tensor:
    narrow, smallest = numbers.half(), torch.finfo(torch.float16).smallest_normal
    # Numbers that are all smaller would keep few of their bits, or none.
    fits = bool((numbers.abs() >= smallest).any()) or not numbers.any()
    return narrow if fits and bool(narrow.isfinite().all()) else numbers
