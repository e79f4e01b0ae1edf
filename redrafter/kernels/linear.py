"""Products of few tokens with a weight of 16 bits or of FP8 (e4m3), where reading the weight takes most of the time.

Each program reads a tile of the weight along a part of its input features. FP8 is widened in registers: every FP8
number is exact in bfloat16 and float16, so the product is exact in the weight, and inputs are not rounded. The last
program of a tile to finish adds up the parts, in an order that does not depend on which program is last.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.launch import Tiling, shared_memory, supports_dependent_launch, widening_assembly

MAX_THIN_TOKENS = 32  # for more tokens torch's 16-bit product is as fast
MAX_FEATURES = 8192  # wider 16-bit weights have more tiles than multiprocessors, and torch's product is as fast
MIN_WEIGHT_BYTES = 8 << 20
# 16-bit programs to launch, and input features for each of them at most, as measured on an H200 at an 8B's sizes. Six
# loads ahead keep the memory busy, so a further split costs more than multiprocessors without a program.
TARGET_PROGRAMS, MAX_INNER = 96, 8192
TILE, STEP, STAGES = 64, 128, 6  # output and input features of a 16-bit tile, and pipelined loads

MAX_WIDENED_TOKENS = 256  # for more tokens, widening the weight first costs less than a slower product
MANY_FEATURES = 8192  # output features above which a large GPU is full with wider tiles
PROGRAMS_AT_ONCE = 264  # two on each multiprocessor of a large GPU
MIN_STEPS = 4  # minimum iterations of a program's loop over input features
PART_COST = 0.03  # cost of a further part of every tile, as a share of the product's time
MAX_SPLIT_TILES = 4096  # tiles whose input features may be split


@triton.jit
def widen(w, OUT, ASSEMBLY: tl.constexpr):
    """Return FP8 bytes in the 16-bit dtype of `OUT`: four at once by `ASSEMBLY`, or one by one if that is None."""
    if ASSEMBLY is not None:
        wide = tl.inline_asm_elementwise(ASSEMBLY, "=r,=r,r", [w], OUT.dtype.element_ty, is_pure=True, pack=4)
    else:
        bits = w.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)  # float16, whose exponent bias is larger by 8
        wide = (half.to(tl.float16, bitcast=True) * 256.0).to(OUT.dtype.element_ty)
    return wide


@triton.jit
def parts_of_tile(PARTS, tile, splits, FEATURES: tl.constexpr, TOKENS: tl.constexpr):
    """Return pointers `[FEATURES, TOKENS]` to the sums of a tile's first split; the other splits follow."""
    within_tile = tl.arange(0, FEATURES)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    return PARTS + tile.to(tl.int64) * splits * (FEATURES * TOKENS) + within_tile


@triton.jit
def is_last_part(acc, parts, count, split, splits):
    """Store the sums of one split, and return whether all others of its tile are stored too.

    The count of stored splits is 0 before the first and after the last of them.
    """
    tl.store(parts + split * (acc.shape[0] * acc.shape[1]), acc)
    # All threads must have stored their sums before one of them counts this split as finished.
    tl.debug_barrier()
    last = tl.atomic_add(count, 1, sem="acq_rel") == splits - 1
    if last:
        # Reset here for the next launch, which saves a kernel that clears the counters.
        tl.store(count, 0)
    return last


@triton.jit
def add_parts(parts, splits, FEATURES: tl.constexpr, TOKENS: tl.constexpr):
    """Return the sums of all splits of a tile, added up in split order, whichever finished last."""
    acc = tl.zeros([FEATURES, TOKENS], tl.float32)
    for other in range(splits):
        # `.cg` reads from the L2 cache, as the L1 cache does not see writes of other multiprocessors.
        acc += tl.load(parts + other * (FEATURES * TOKENS), cache_modifier=".cg")
    return acc


@triton.jit(do_not_specialize=["tokens", "splits"])
def _product_kernel(
    X, W, SCALE, BIAS, OUT, PARTS, COUNTS, tokens, features, inner, w_stride, splits,
    TOKENS: tl.constexpr, FEATURES: tl.constexpr, STEP: tl.constexpr, WHOLE: tl.constexpr, WIDEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr, FEW: tl.constexpr, SPLIT: tl.constexpr,
    ASSEMBLY: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of tokens with a tile of the weight, over one of `splits` parts of the input features.

    `WHOLE` is set if all tiles and steps of the weight are full, `WIDEN` if the weight is FP8 and has scales.
    `RESIDUAL` adds the product's SiLU to the inputs, which are as many as the outputs. `FEW` has tokens in the rows of
    the sums, for fewer than 64: no two warps then widen the same numbers, and bytes are read from shared memory in
    groups of four.

    With several splits (`SPLIT`), the last program of a tile to finish adds up what all of them stored in `PARTS`.
    `FOLLOW` is set if the kernel may be launched before the previous one is done (programmatic dependent launch) and
    must wait for it before it reads `X`.
    """
    split, tile = tl.program_id(2), tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    f = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    k = tl.arange(0, STEP)
    share = tl.cdiv(tl.cdiv(inner, STEP), splits) * STEP
    low = split * share
    high = tl.minimum(low + share, inner)
    live = (t < tokens)[None, :]
    w_at = W + f.to(tl.int64)[:, None] * w_stride + k[None, :]
    x_at = X + t.to(tl.int64)[None, :] * inner + k[:, None]
    acc = tl.zeros([TOKENS, FEATURES] if FEW else [FEATURES, TOKENS], tl.float32)
    if FOLLOW:
        tl.extra.cuda.gdc_wait()
    for start in range(low, high, STEP):
        if WHOLE:
            # A step reads a weight once, so it should not displace inputs and partial sums from the L2 cache.
            w = tl.load(w_at + start, eviction_policy="evict_first")
            x = tl.load(x_at + start, live, 0.0)
        else:
            inside = start + k < inner
            w = tl.load(w_at + start, inside[None, :] & (f < features)[:, None], 0)
            x = tl.load(x_at + start, live & inside[:, None], 0.0)
        if FEW:
            w, x = tl.trans(w), tl.trans(x)
        if WIDEN:
            w = widen(w, X, ASSEMBLY)
        acc = tl.dot(x, w, acc, input_precision="ieee") if FEW else tl.dot(w, x, acc, input_precision="ieee")
    if FEW:
        acc = tl.trans(acc)
    if SPLIT:
        parts = parts_of_tile(PARTS, tile, splits, FEATURES, TOKENS)
        if not is_last_part(acc, parts, COUNTS + tile, split, splits):
            return
        acc = add_parts(parts, splits, FEATURES, TOKENS)
    if WIDEN:
        # Scaled after the sum, once per feature, since a scale is constant along the input features.
        acc *= tl.load(SCALE + f, f < features, 0.0)[:, None]
    if HAS_BIAS:
        acc += tl.load(BIAS + f, f < features, 0.0).to(tl.float32)[:, None]
    # Fused, as reading the sums again would cost a launch and the latency of a small kernel.
    if RESIDUAL:
        x_in = tl.load(X + t.to(tl.int64)[None, :] * inner + f[:, None], live & (f < features)[:, None], 0.0)
        acc = x_in.to(tl.float32) + acc * tl.sigmoid(acc)
    out = OUT + t.to(tl.int64)[None, :] * features + f[:, None]
    tl.store(out, acc.to(OUT.dtype.element_ty), live & (f < features)[:, None])


@triton.jit
def _widen_float8_kernel(
    W, SCALE, OUT, inner, w_stride, COLUMNS: tl.constexpr, ASSEMBLY: tl.constexpr
):  # fmt: skip
    """Widen a part of one row of the weight, and multiply it by the row's scale."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    w = tl.load(W + row * w_stride + k, k < inner, 0)
    wide = widen(w, OUT, ASSEMBLY).to(tl.float32) * tl.load(SCALE + row)
    tl.store(OUT + row * inner + k, wide.to(OUT.dtype.element_ty), k < inner)


def _choose_widened_tiling(tokens: int, features: int) -> Tiling:
    """Choose the tiling by the numbers of tokens and output features, as measured on an H200 at an 8B model's sizes."""
    many = features > MANY_FEATURES
    if tokens <= 16:
        return Tiling(16, 128, 256, 3, 4) if many else Tiling(16, 64, 256, 4, 4)
    if tokens <= 32:
        return Tiling(32, 128, 128, 4, 4)
    if tokens <= 64:
        return Tiling(64, 128, 128, 4, 8) if many else Tiling(64, 64, 128, 4, 4)
    return Tiling(256, 128, 64, 3, 8) if many and tokens > 128 else Tiling(128, 64, 128, 3, 4)


def choose_splits(tiles: int, steps: int) -> int:
    """Choose the number of parts of the steps over the input features, so that programs end at about the same time."""
    if tiles > MAX_SPLIT_TILES:
        return 1

    def cost(splits: int) -> float:
        # Waves of programs, times the steps of each, times the cost of storing and adding parts.
        return -(-tiles * splits // PROGRAMS_AT_ONCE) * -(-steps // splits) / steps * (1 + PART_COST * splits)

    return min(range(1, max(min(steps // MIN_STEPS, 16), 1) + 1), key=cost)


def widened_product(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, tiling: Tiling | None = None
) -> Tensor:
    """Return `x @ (weight * scale).T + bias`, `[T, F]`.

    Args:
        x: Inputs, `[T, D]`, bfloat16 or float16.
        weight: Weight in the layout of `nn.Linear`, `[F, D]` float8_e4m3fn; rows need not be contiguous.
        scale: Multiplier of each row of it, `[F]` float32.
        bias: `[F]`; None for none.
        tiling: Tiling of the product; None for one that suits its size.
    """
    tokens, features = len(x), len(weight)
    tiling = _choose_widened_tiling(tokens, features) if tiling is None else tiling
    if tiling.splits is None and tokens and features:
        tiles = triton.cdiv(tokens, tiling.tokens) * triton.cdiv(features, tiling.features)
        tiling = tiling._replace(splits=choose_splits(tiles, triton.cdiv(x.shape[1], tiling.step)))
    return _product(x, weight, scale, bias, tiling)


def is_supported_weight(weight: Tensor) -> bool:
    """Return whether `split_k_linear` can multiply with a weight `[F, D]` and is faster than torch's product."""
    features, inner = weight.shape
    return (
        weight.element_size() == 2
        and features % TILE == 0
        and inner % STEP == 0
        and weight.stride(1) == 1
        and features <= MAX_FEATURES
        and weight.numel() * 2 >= MIN_WEIGHT_BYTES
    )


def split_k_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, residual: bool = False) -> Tensor:
    """Return `x @ weight.T + bias`, `[T, F]`, or `x` plus the SiLU of it.

    Args:
        x: Inputs, `[T, D]`, of at most `MAX_THIN_TOKENS` tokens.
        weight: Weight in the layout of `nn.Linear`, `[F, D]`, for which `is_supported_weight` is true.
        bias: Bias, `[F]`; None for none.
        residual: Whether to return the sum; F must be D.
    """
    inner, tokens = x.shape[1], max(triton.next_power_of_2(len(x)), 16)
    splits = max(min(TARGET_PROGRAMS // (len(weight) // TILE), inner // 512), triton.cdiv(inner, MAX_INNER))
    stages = min(STAGES, shared_memory(x.device) // ((TILE + tokens) * STEP * weight.element_size()))
    tiling = Tiling(tokens, TILE, STEP, stages, 4, splits)
    return _product(x, weight, None, bias, tiling, residual)


def _product(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, tiling: Tiling, residual: bool = False
) -> Tensor:
    (tokens, inner), features, widen = x.shape, len(weight), scale is not None
    out = x.new_empty(tokens, features)
    if not out.numel():
        return out
    blocks, tiles = triton.cdiv(tokens, tiling.tokens), triton.cdiv(features, tiling.features)
    splits = tiling.splits or 1
    parts = out
    if splits > 1:
        parts = x.new_empty(blocks * tiles * splits * tiling.features * tiling.tokens, dtype=torch.float32)
    assembly, follow = widening_assembly(weight.dtype, x.dtype, x.device), supports_dependent_launch(x.device)
    _product_kernel[(blocks, tiles, splits)](
        x.contiguous(), weight.view(torch.uint8) if widen else weight, scale, bias, out, parts,
        finished_counts(x.device),
        tokens, features, inner, weight.stride(0), splits,
        TOKENS=tiling.tokens, FEATURES=tiling.features, STEP=tiling.step,
        WHOLE=features % tiling.features == 0 and inner % tiling.step == 0, WIDEN=widen, HAS_BIAS=bias is not None,
        RESIDUAL=residual,
        FEW=widen and tiling.tokens < 64, SPLIT=splits > 1, ASSEMBLY=assembly, FOLLOW=follow, launch_pdl=follow,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return out


def widen_float8(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `weight * scale`, `[F, D]`.

    Args:
        weight: `[F, D]` float8_e4m3fn; rows need not be contiguous.
        scale: Multiplier of each row, `[F]` float32.
        dtype: bfloat16 or float16.
    """
    features, inner = weight.shape
    out = torch.empty(features, inner, dtype=dtype, device=weight.device)
    if not out.numel():
        return out
    columns = min(triton.next_power_of_2(inner), 2048)
    _widen_float8_kernel[(features, triton.cdiv(inner, columns))](
        weight.view(torch.uint8), scale, out, inner, weight.stride(0),
        COLUMNS=columns, ASSEMBLY=widening_assembly(weight.dtype, dtype, weight.device),
    )  # fmt: skip
    return out


@functools.cache
def finished_counts(device: torch.device) -> Tensor:
    """Return the counters of finished programs per tile; 0 between launches, as a device runs one launch at a time."""
    return torch.zeros(MAX_SPLIT_TILES, dtype=torch.int32, device=device)
