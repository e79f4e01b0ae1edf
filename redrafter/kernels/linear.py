"""A linear layer for few tokens, where reading the weight takes all the time: a split-K matrix product in one launch.

Each program reads a tile of the weight along a part of its input features. The last program of a tile to finish adds up
the parts. The order of that sum is fixed, so the result does not depend on which program is last.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.launch import supports_dependent_launch

__all__ = ["MAX_THIN_TOKENS", "is_supported_weight", "split_k_linear"]

MAX_THIN_TOKENS = 32  # for more tokens torch's product is as fast
MAX_FEATURES = 4608  # wider weights have tiles for all multiprocessors, and torch's product is as fast
MIN_WEIGHT_BYTES = 8 << 20
TARGET_PROGRAMS = 132  # programs to launch: one for each multiprocessor of a large GPU
TILE = 64  # output features per program


@triton.jit(do_not_specialize=["tokens", "splits"])
def _split_k_kernel(
    X, W, OUT, PARTS, COUNTS, tokens, features, inner, splits,
    TOKENS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, SPLIT: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    """Multiply with one tile of the weight: `TILE` output features by one of `splits` parts of the input features.

    With several splits (`SPLIT`), each program stores its partial sums in `PARTS` and counts itself in `COUNTS`. The
    last program of a tile to do so adds up the parts in their order, writes the sum to `OUT`, and sets the count back
    to 0. With one split, the product is written to `OUT` at once. `FOLLOW` says that the kernel may be launched before
    the previous one is done (programmatic dependent launch) and must wait for it before it reads `X`.
    """
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
    mask = (t < tokens)[None, :] & (n < features)[:, None]
    if SPLIT:
        within_tile = tl.arange(0, TILE)[:, None] * TOKENS + t[None, :]
        parts = PARTS + tile.to(tl.int64) * splits * TILE * TOKENS + within_tile
        tl.store(parts + split * TILE * TOKENS, acc)
        tl.debug_barrier()
        if tl.atomic_add(COUNTS + tile, 1, sem="acq_rel") == splits - 1:
            acc = tl.zeros([TILE, TOKENS], tl.float32)
            for other in range(splits):
                acc += tl.load(parts + other * TILE * TOKENS, cache_modifier=".cg")
            tl.store(COUNTS + tile, 0)
            tl.store(out, acc.to(OUT.dtype.element_ty), mask)
    else:
        tl.store(out, acc.to(OUT.dtype.element_ty), mask)


def is_supported_weight(weight: Tensor) -> bool:
    """Return whether `split_k_linear` can multiply with a weight `[F, D]` and is faster than torch's product."""
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
    """Return `x @ weight.T`, `[T, F]`.

    Args:
        x: Inputs, `[T, D]` of at most `MAX_THIN_TOKENS` tokens.
        weight: Weight as `nn.Linear` has it, `[F, D]`, for which `is_supported_weight` is true.
    """
    tokens, inner = x.shape
    features = weight.shape[0]
    tiles = features // TILE
    splits = max(min(TARGET_PROGRAMS // tiles, inner // 512), 1)
    block = max(triton.next_power_of_2(tokens), 16)
    out = x.new_empty(tokens, features)
    parts = out if splits == 1 else x.new_empty(tiles * splits * TILE * block, dtype=torch.float32)
    follow = supports_dependent_launch(x.device)
    _split_k_kernel[(tiles, splits)](
        x.contiguous(), weight, out, parts, _finished_counts(x.device), tokens, features, inner, splits,
        TOKENS=block, TILE=TILE, STEP=128, SPLIT=splits > 1, FOLLOW=follow, launch_pdl=follow,
        num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


@functools.cache
def _finished_counts(device: torch.device) -> Tensor:
    """Return the counters of programs done with each tile; 0 between launches, of which a device runs one at a time."""
    return torch.zeros(MAX_FEATURES // TILE, dtype=torch.int32, device=device)
