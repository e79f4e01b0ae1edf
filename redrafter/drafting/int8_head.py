"""A drafter's head in 8 bits, for drafts on a CPU, where reading the head takes most of a draft's time.

Each level of a search reads the whole head. With 49,152 ids of 512 features in float32 that took one core 9.6 ms for
one beam and 18.4 ms for five, and 2.8 and 4.4 ms in 8 bits; in bfloat16 6.1 and 7.0 ms. Rounding affects only drafts,
not the output, as the target verifies them.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

LEAST_WEIGHTS = 1 << 22  # smaller heads stay in a CPU's caches in full precision


class Int8Head(NamedTuple):
    """The weight of a head, rounded to 8 bits.

    Attributes:
        weight: The weight divided by its scales, transposed, `[R, V']` int8.
        scale: Multiplier of each id's weights, `[V']` float32.
    """

    weight: Tensor
    scale: Tensor

    @classmethod
    def from_linear(cls, head: nn.Module | None) -> "Int8Head | None":
        """Return the rounded weight of a head; None where the head is small, or no faster in 8 bits."""
        if type(head) is not nn.Linear or head.bias is not None or head.weight.numel() < LEAST_WEIGHTS:
            return None
        # Without AVX-512's 8-bit products the rounded head is not faster than the one in full precision.
        if head.weight.device.type != "cpu" or torch.backends.cpu.get_cpu_capability() != "AVX512":
            return None
        rounded, scale = _round(head.weight.detach())
        return cls(rounded.t(), scale[:, 0])

    def __call__(self, x: Tensor) -> Tensor:
        """Return logits `[..., V']` float32 of inputs `[..., R]`, which are rounded too."""
        rounded, scale = _round(x.flatten(0, -2))
        product = torch._int_mm(rounded, self.weight) * self.scale
        return product.mul_(scale).unflatten(0, x.shape[:-1])


def _round(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows `[N, R]` divided by their scales, int8, and the scales, `[N, 1]` float32."""
    scale = x.abs().amax(dim=1, keepdim=True).float().clamp_(min=1e-30) / 127
    return (x / scale).round_().to(torch.int8), scale
