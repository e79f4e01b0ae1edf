"""Products with grouped weights of 4 and 8 bits, which are dequantised in registers.

Reading the weight takes most of the time for few tokens, and the instructions that dequantise it take almost as much.
So each program reads a tile of codes and scales along a part of the input features, and multiplies it block by block: a
block is 16 bytes of a row, the codes of 32 or 16 input features with one scale. Output features are the rows of the
sums and tokens the columns, hence no two warps dequantise the same number. The last program of a tile to finish adds up
the parts.

The parts of a sum, and the order of its blocks, depend only on the sizes of the weight. So a token has the same bits
whatever else is in the forward.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.grouped_weight import GroupedWeight
from redrafter.kernels.launch import Tiling, shared_memory, supports_dependent_launch
from redrafter.kernels.linear import (
    MANY_FEATURES,
    MAX_SPLIT_TILES,
    PROGRAMS_AT_ONCE,
    add_parts,
    finished_counts,
    is_last_part,
    parts_of_tile,
)

BYTES = tl.constexpr(16)  # of a row's block
UNIT = 128  # bytes of a row per unit of a part, a multiple of every step
SPLITS = 4  # parts of the input features of a weight that has fewer tiles than a GPU runs at once
FEATURES = 64  # output features of the tiles that the number of parts depends on, for any number of tokens
MAX_TOKENS = 64  # for more tokens, dequantising the weight first costs less than a slower product

# A register of four bytes becomes float32 numbers by a few instructions of NVIDIA GPUs: a code's bits are placed in the
# mantissa of a power of two. Codes of 4 bits, c, become 16 + c; codes of 8 bits become 2**23 + 128 + c. The GPU's own
# instruction converts at a quarter of the rate.
_FOUR_BITS = """
{
    .reg .b32 code;
    SHIFT;
    lop3.b32 code, code, 0x78787878, 0x80808080, 0xEA;
    prmt.b32 $0, code, 0x41, 0x4055;
    prmt.b32 $1, code, 0x41, 0x4155;
    prmt.b32 $2, code, 0x41, 0x4255;
    prmt.b32 $3, code, 0x41, 0x4355;
}
"""
_EIGHT_BITS = """
{
    .reg .b32 code;
    xor.b32 code, $4, 0x80808080;
    prmt.b32 $0, code, 0x4B, 0x4550;
    prmt.b32 $1, code, 0x4B, 0x4551;
    prmt.b32 $2, code, 0x4B, 0x4552;
    prmt.b32 $3, code, 0x4B, 0x4553;
}
"""
# Of the low and of the high halves of bytes; those of codes of 8 bits are the same.
_ASSEMBLY = {
    4: (_FOUR_BITS.replace("SHIFT", "shl.b32 code, $4, 3"), _FOUR_BITS.replace("SHIFT", "shr.u32 code, $4, 1")),
    8: (_EIGHT_BITS, _EIGHT_BITS),
}


@functools.cache
def codes_assembly(bits: int, dtype: torch.dtype, device: torch.device) -> tuple[str, str] | None:
    """Return assembly that widens codes, for `tl.inline_asm_elementwise`; None for float32, and without NVIDIA's GPU.

    A minimum that is less than 1/512 of its scale is then rounded to about 2**-21 of it.
    """
    if device.type != "cuda" or torch.version.cuda is None or dtype == torch.float32:
        return None
    return _ASSEMBLY[bits]


@triton.jit
def _columns(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """Return the columns of `x [ROWS, COLUMNS]` in parts, which the compiler finds in the registers of `x`."""
    if PARTS == 1:
        return (x,)
    else:
        low, high = tl.split(x.reshape([ROWS, 2, COLUMNS // 2]).permute([0, 2, 1]))
        half: tl.constexpr = COLUMNS // 2
        return _columns(low, ROWS, half, PARTS // 2) + _columns(high, ROWS, half, PARTS // 2)


@triton.jit
def _spread(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Return `x [ROWS, COLUMNS]` with each column repeated, `[ROWS, WIDTH]`."""
    return tl.broadcast_to(x[:, :, None], [ROWS, COLUMNS, WIDTH // COLUMNS]).reshape([ROWS, WIDTH])


@triton.jit
def _dequantize(codes, scale, minimum, X, HIGH: tl.constexpr, BITS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return the numbers of codes, or of the low or `HIGH` halves of bytes, in the dtype of `X`."""
    if ASSEMBLY is None:
        wide = codes.to(tl.float32) if BITS == 8 else (codes >> 4 if HIGH else codes & 15).to(tl.float32)
    else:
        wide = tl.inline_asm_elementwise(ASSEMBLY[HIGH], "=r,=r,=r,=r,r", [codes], tl.float32, is_pure=True, pack=4)
        if BITS == 4:
            minimum -= 16 * scale
        else:
            wide -= 8388736.0
    return (wide * scale + minimum).to(X.dtype.element_ty)


@triton.jit(do_not_specialize=["tokens", "splits"])
def _grouped_product_kernel(
    X, W, SCALE, MINIMUM, BIAS, OUT, PARTS, COUNTS, tokens, features, inner, row, groups, splits,
    BITS: tl.constexpr, GROUP: tl.constexpr, PER: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr,
    STEP: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr, HAS_MINIMUM: tl.constexpr,
    HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr, ASSEMBLY: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of the weight with a tile of tokens, over one of `splits` parts of the input features.

    A step is `STEP` of the `row` bytes of a row, which have `PER` scales. `WHOLE` is set if all tiles and steps of the
    weight are full, `FOLLOW` if the kernel may be launched while the previous one runs (programmatic dependent launch)
    and must wait for it before it reads `X`.
    """
    split, tile = tl.program_id(2), tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    f = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    j, g = tl.arange(0, STEP), tl.arange(0, PER)
    IN_BYTE: tl.constexpr = 8 // BITS
    INPUTS: tl.constexpr = STEP * IN_BYTE  # of a step
    BLOCKS: tl.constexpr = STEP // BYTES
    # Parts are whole units, so that their borders do not depend on the step of a tiling.
    share = tl.cdiv(tl.cdiv(row, UNIT), splits) * (UNIT // STEP)
    low = split * share
    high = tl.minimum(low + share, tl.cdiv(row, STEP))
    live = (t < tokens)[:, None]
    k = j // BYTES * (BYTES * IN_BYTE) + j % BYTES  # of 4 bits those in the low halves of bytes; high ones are 16 later
    w_at = W + f.to(tl.int64)[:, None] * row + j[None, :]
    x_at = X + t.to(tl.int64)[:, None] * inner + k[None, :]
    s_at = f.to(tl.int64)[:, None] * groups + g[None, :]
    acc = tl.zeros([FEATURES, TOKENS], tl.float32)
    if FOLLOW:
        tl.extra.cuda.gdc_wait()
    for step in range(low, high):
        if PER * GROUP == INPUTS:
            at = s_at + step * PER
        else:  # a group that is no part of a step
            at = f.to(tl.int64)[:, None] * groups + ((step * PER + g) * (INPUTS // PER) // GROUP)[None, :]
        inside = (step * STEP + j < row)[None, :]
        valid = (f < features)[:, None]
        grouped = valid & ((step * PER + g) * (INPUTS // PER) < inner)[None, :]
        zero: tl.constexpr = None if WHOLE else 0
        codes = tl.load(w_at + step * STEP, None if WHOLE else valid & inside, zero, eviction_policy="evict_first")
        scale = tl.load(SCALE + at, None if WHOLE else grouped, zero)
        minimum = tl.zeros([FEATURES, PER], tl.float32)
        if HAS_MINIMUM:
            minimum = tl.load(MINIMUM + at, None if WHOLE else grouped, zero)
        x_low = tl.load(x_at + step * INPUTS, live if WHOLE else live & inside, 0.0)
        x_high = x_low
        if BITS == 4:
            x_high = tl.load(x_at + step * INPUTS + BYTES, live if WHOLE else live & inside, 0.0)
        scale, minimum = scale.to(tl.float32), minimum.to(tl.float32)
        if WIDE:
            scale = _spread(scale, FEATURES, PER, STEP)
            minimum = _spread(minimum, FEATURES, PER, STEP)
            for half in tl.static_range(IN_BYTE):
                w = _dequantize(codes, scale, minimum, X, half, BITS, ASSEMBLY)
                acc = tl.dot(w, tl.trans(x_high if half else x_low), acc, input_precision="ieee")
        else:
            scales, minima = _columns(scale, FEATURES, PER, PER), _columns(minimum, FEATURES, PER, PER)
            blocks = _columns(codes, FEATURES, STEP, BLOCKS)
            x_blocks = (_columns(x_low, TOKENS, STEP, BLOCKS), _columns(x_high, TOKENS, STEP, BLOCKS))
            # Of 4 bits, the low halves of four blocks and then their high ones, as above.
            for four in tl.static_range(BLOCKS // 4):
                for half in tl.static_range(IN_BYTE):
                    for i in tl.static_range(4):
                        scale_i = scales[(four * 4 + i) * PER // BLOCKS].reshape([FEATURES, 1])
                        minimum_i = minima[(four * 4 + i) * PER // BLOCKS].reshape([FEATURES, 1])
                        w = _dequantize(blocks[four * 4 + i], scale_i, minimum_i, X, half, BITS, ASSEMBLY)
                        x = x_blocks[half][four * 4 + i]
                        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    if SPLIT:
        parts = parts_of_tile(PARTS, tile, splits, FEATURES, TOKENS)
        if not is_last_part(acc, parts, COUNTS + tile, split, splits):
            return
        acc = add_parts(parts, splits, FEATURES, TOKENS)
    if HAS_BIAS:
        acc += tl.load(BIAS + f, f < features, 0.0).to(tl.float32)[:, None]
    out = OUT + t.to(tl.int64)[None, :] * features + f[:, None]
    tl.store(out, acc.to(OUT.dtype.element_ty), (t < tokens)[None, :] & (f < features)[:, None])


@triton.jit
def _widen_kernel(
    W, SCALE, MINIMUM, OUT, row, groups,
    BITS: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, HAS_MINIMUM: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Dequantise a part of one row of the weight."""
    f = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    IN_BYTE: tl.constexpr = 8 // BITS
    k = j // BYTES * (BYTES * IN_BYTE) + j % BYTES
    codes = tl.load(W + f * row + j, j < row, 0)
    at = f * groups + k // GROUP
    scale = tl.load(SCALE + at, j < row, 0.0).to(tl.float32)
    minimum = tl.zeros([COLUMNS], tl.float32)
    if HAS_MINIMUM:
        minimum = tl.load(MINIMUM + at, j < row, 0.0).to(tl.float32)
    for half in tl.static_range(IN_BYTE):
        wide = _dequantize(codes, scale, minimum, OUT, half, BITS, ASSEMBLY)
        tl.store(OUT + f * row * IN_BYTE + k + half * BYTES, wide, j < row)


def _choose_tiling(tokens: int, weight: GroupedWeight, half: bool) -> Tiling:
    """Choose the tiling by size and dtype, as measured on an H200 at an 8B model's sizes; steps are in bytes of a row.

    Four warps and more multiply by the instructions of a warp group, with the same bits.
    """
    if not half:
        return Tiling(16, 32, 64, 2, 4)
    # At least four bytes of scales per row and step, or a GPU cannot load them ahead.
    if weight.group * weight.bits * 4 > 64 * 8 * weight.scale.element_size():
        return Tiling(min(max(triton.next_power_of_2(tokens), 16), 64), 64, 128, 3, 2 if tokens <= 32 else 4)
    if tokens <= 16:
        return Tiling(16, 64, 64, 6, 2)
    if tokens <= 32:
        return Tiling(32, 128 if len(weight.codes) > MANY_FEATURES else 64, 64, 3, 2)
    return Tiling(64, 128, 64, 3, 4) if tokens <= 64 else Tiling(128, 64, 64, 3, 4)


def _contiguous(weight: GroupedWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    minimum = weight.minimum
    return weight.codes.contiguous(), weight.scale.contiguous(), None if minimum is None else minimum.contiguous()


def grouped_product(
    x: Tensor, weight: GroupedWeight, bias: Tensor | None = None, tiling: Tiling | None = None
) -> Tensor:
    """Return `x @ weight.T + bias`, `[T, F]`, in the dtype of `x`.

    Args:
        x: Inputs, `[T, D]`.
        weight: Weight, `[F, D]`.
        bias: `[F]`; None for none.
        tiling: Tiling of the product; None for one that suits its size. Its steps are in bytes of a row.
    """
    (tokens, inner), (features, row) = x.shape, weight.codes.shape
    out = x.new_empty(tokens, features)
    if not out.numel():
        return out
    tiling = _choose_tiling(tokens, weight, x.element_size() == 2) if tiling is None else tiling
    blocks, tiles = triton.cdiv(tokens, tiling.tokens), triton.cdiv(features, tiling.features)
    # Not by the tiling's own width, or the number of tokens would change the order of sums.
    splits = tiling.splits or (1 if triton.cdiv(features, FEATURES) > PROGRAMS_AT_ONCE else SPLITS)
    parts = out
    if splits > 1:
        if blocks > 1 and blocks * tiles > MAX_SPLIT_TILES:  # the number of counters is limited
            most = max(MAX_SPLIT_TILES // tiles, 1) * tiling.tokens
            # With the same tiling, or the parts of these sums would differ from other calls'.
            return torch.cat([grouped_product(part, weight, bias, tiling) for part in x.split(most)])
        parts = x.new_empty(blocks * tiles * splits * tiling.features * tiling.tokens, dtype=torch.float32)
    follow = supports_dependent_launch(x.device)
    inputs = tiling.step * 8 // weight.bits
    scales = max(inputs // min(weight.group & -weight.group, inputs), 2)
    scale_bytes = scales * weight.scale.element_size() * (1 if weight.minimum is None else 2)
    loaded = tiling.features * (tiling.step + scale_bytes) + tiling.tokens * inputs * x.element_size()
    stages = max(min(tiling.stages, shared_memory(x.device) // loaded), 1)
    _grouped_product_kernel[(blocks, tiles, splits)](
        x.contiguous(), *_contiguous(weight), bias, out, parts, finished_counts(x.device),
        tokens, features, inner, row, weight.scale.shape[1], splits,
        BITS=weight.bits, GROUP=weight.group, PER=scales, TOKENS=tiling.tokens, FEATURES=tiling.features,
        STEP=tiling.step, UNIT=UNIT, WIDE=tiling.warps >= 4,
        WHOLE=features % tiling.features == 0 and row % tiling.step == 0, HAS_MINIMUM=weight.minimum is not None,
        HAS_BIAS=bias is not None, SPLIT=splits > 1, ASSEMBLY=codes_assembly(weight.bits, x.dtype, x.device),
        FOLLOW=follow, launch_pdl=follow,
        num_warps=tiling.warps, num_stages=stages,
    )  # fmt: skip
    return out


def widen_grouped(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """Return what `weight.dequantize(dtype)` does, `[F, D]`, without tensors in between."""
    features, row = weight.codes.shape
    out = torch.empty(weight.shape, dtype=dtype, device=weight.codes.device)
    if not out.numel():
        return out
    columns = min(triton.next_power_of_2(row), 2048)
    _widen_kernel[(features, triton.cdiv(row, columns))](
        *_contiguous(weight), out, row, weight.scale.shape[1],
        BITS=weight.bits, GROUP=weight.group, COLUMNS=columns, HAS_MINIMUM=weight.minimum is not None,
        ASSEMBLY=codes_assembly(weight.bits, dtype, out.device),
    )  # fmt: skip
    return out
