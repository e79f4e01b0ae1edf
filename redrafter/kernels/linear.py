"""A linear layer for few tokens, where reading the weight is all the work.

Each program reads a tile of the weight along a part of its rows; the last of those that share a tile adds up what they
found, so that a product is one launch. The order of the sum is fixed: the result does not depend on who is last.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.launch import follows_closely

__all__ = ["MAX_THIN_TOKENS", "is_supported_weight", "split_k_linear"]

MAX_THIN_TOKENS = 32  # beyond it the library's product is as fast
MAX_FEATURES = 4608  # beyond it there are tiles for all multiprocessors, and the library's product is as fast
MIN_WEIGHT_BYTES = 8 << 20  # of a weight
PROGRAMS = 132  # one for each multiprocessor of a large GPU
TILE = 64


@triton.jit(do_not_specialize=["tokens", "splits"])
def _product(
    X, W, OUT, PARTS, COUNTS, tokens, features, inner, splits,
    TOKENS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, SPLIT: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    n = tile * TILE + tl.arange(0, TILE)
    t, k = tl.arange(0, TOKENS), tl.arange(0, STEP)
    share = tl.cdiv(tl.cdiv(inner, STEP), splits) * STEP
    low = split * share
    high = tl.minimum(low + share, inner)
    acc = tl.zeros([TILE, TOKENS], tl.float32)
    weight = W + n.to(tl.int64)[:, None] * inner + k[None, :]
    x_at = X + t[None, :] * inner + k[:, None]
    if FOLLOW:
        tl.extra.cuda.gdc_wait()
    for start in range(low, high, STEP):
        w = tl.load(weight + start, eviction_policy="evict_first")
        x = tl.load(x_at + start, (t < tokens)[None, :], 0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    out = OUT + t[None, :] * features + n[:, None]
    held = (t < tokens)[None, :] & (n < features)[:, None]
    if SPLIT:
        own = tl.arange(0, TILE)[:, None] * TOKENS + t[None, :]
        parts = PARTS + tile.to(tl.int64) * splits * TILE * TOKENS + own
        tl.store(parts + split * TILE * TOKENS, acc)
        tl.debug_barrier()
        if tl.atomic_add(COUNTS + tile, 1, sem="acq_rel") == splits - 1:
            acc = tl.zeros([TILE, TOKENS], tl.float32)
            for other in range(splits):
                acc += tl.load(parts + other * TILE * TOKENS, cache_modifier=".cg")
            tl.store(COUNTS + tile, 0)
            tl.store(out, acc.to(OUT.dtype.element_ty), held)
    else:
        tl.store(out, acc.to(OUT.dtype.element_ty), held)


def is_supported_weight(weight: Tensor) -> bool:
    """Whether `split_k_linear` can take a weight and is worth it."""
    features, inner = weight.shape
    return (
        weight.element_size() == 2
        and features % TILE == 0
        and inner % 128 == 0
        and weight.is_contiguous()
        and features <= MAX_FEATURES
        and weight.numel() * 2 >= MIN_WEIGHT_BYTES
    )


def split_k_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x: `[T, D]` of at most `MAX_THIN_TOKENS` tokens; weight: `[F, D]`, as `nn.Linear` has it. Returns `[T, F]`."""
    tokens, inner = x.shape
    features = weight.shape[0]
    tiles = features // TILE
    splits = max(min(PROGRAMS // tiles, inner // 512), 1)
    block = max(triton.next_power_of_2(tokens), 16)
    out = x.new_empty(tokens, features)
    parts = out if splits == 1 else x.new_empty(tiles * splits * TILE * block, dtype=torch.float32)
    follow = follows_closely(x.device)
    _product[(tiles, splits)](
        x.contiguous(), weight, out, parts, _counts(x.device), tokens, features, inner, splits,
        TOKENS=block, TILE=TILE, STEP=128, SPLIT=splits > 1, FOLLOW=follow, launch_pdl=follow,
        num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


@functools.cache
def _counts(device: torch.device) -> Tensor:
    """How many programs are done with each tile: 0 between launches, which follow one another on a device."""
    return torch.zeros(MAX_FEATURES // TILE, dtype=torch.int32, device=device)
