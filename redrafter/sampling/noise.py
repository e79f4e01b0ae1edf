"""Gumbel noise that depends only on seed, position and token id.

The token at position t is `argmax(scores_t + gumbel(seed, t))`, which is a sample from `softmax(scores_t)` (the
Gumbel-max trick). Because the noise is keyed by position, the same seed gives the same tokens with speculation on or
off, in any batch and under any tree; and the drafter may look at it, since no output depends on what is drafted.

The generator is counter-based SplitMix64 (Steele, Lea and Flood 2014): the stream of a (seed, position) pair starts at
a hash of the pair, and token id `v` reads its output number `v`. Integer arithmetic only, so every device agrees.
"""

import torch
from torch import Tensor

# Further streams for rejection sampling, as sharing the target's own stream would bias its result.
DRAFT, ACCEPT = 1, 2

GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)  # the golden ratio, odd, as a signed 64-bit integer
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def _shift_xor(x: Tensor, bits: int) -> Tensor:
    """Compute `x ^= x >>> bits` in place; torch shifts arithmetically, so the sign's copies are masked off."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def mix(x: Tensor) -> Tensor:
    """Apply SplitMix64's finalizer in place, on int64 that wraps."""
    _shift_xor(x, 30).mul_(_MIX_1)
    _shift_xor(x, 27).mul_(_MIX_2)
    return _shift_xor(x, 31)


def streams(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return the start of each noise stream, `[B, P]` int64, for seeds `[B]` and positions `[B, P]`."""
    return mix(mix(seeds * GAMMA)[:, None] + positions * GAMMA)


def branch(seeds: Tensor, stream: int) -> Tensor:
    """Return seeds `[B]` of a noise stream that is independent of the stream of `seeds` `[B]`."""
    return mix(mix(seeds * GAMMA) + (stream * _MIX_2) % (1 << 63))


def gumbel(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Return standard Gumbel noise, finite, `[B, P, V]` float32.

    It is for tokens drawn at `positions` `[B, P]` int64 with seeds `[B]` and token ids `[V]`, both int64.
    """
    bits = mix(streams(seeds, positions)[:, :, None] + (ids + 1) * GAMMA)  # [B, P, V]
    # `v` keeps its relative precision near 0, where -log(-log(1 - v)) is large and decides which token wins.
    v = (bits >> 11).bitwise_and_((1 << 53) - 1).to(torch.float32).add_(0.5).mul_(2.0**-53)
    # A value that rounds to 1 would make the noise infinite, so its token would win over any score.
    return v.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_().log_().neg_()
