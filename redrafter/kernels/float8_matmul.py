"""Products of FP8 (e4m3) weights and FP8 inputs, for few tokens.

Reading the weight takes most of the time. Each program reads a tile of it along a part of its input features. Output
features are the rows of its sums and tokens the columns, so that a few tokens use the tensor cores' tiles as well as
many do. Sums are moved to float32 after every `EXACT_AFTER` products, as in torch. The last program of a tile to finish
adds up the parts.

The parts of a sum, and its order, depend only on the sizes of the weight. So a token has the same bits whatever else is
in the forward: rounded to FP8 by the next layer, a difference in the last bit may become one in the fourth.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.launch import Tiling, supports_dependent_launch
from redrafter.kernels.linear import (
    MANY_FEATURES,
    MAX_SPLIT_TILES,
    add_parts,
    choose_splits,
    finished_counts,
    is_last_part,
    parts_of_tile,
)

EXACT_AFTER = tl.constexpr(128)  # products that tensor cores add up with fewer bits than float32 has
UNIT = tl.constexpr(256)  # input features per unit of a part, a multiple of every step


@triton.jit(do_not_specialize=["tokens", "splits"])
def _float8_product_kernel(
    X, X_SCALE, W, W_SCALE, BIAS, OUT, PARTS, COUNTS, tokens, features, inner, w_stride, splits,
    TOKENS: tl.constexpr, FEATURES: tl.constexpr, STEP: tl.constexpr, WHOLE: tl.constexpr, HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr, AHEAD: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of the weight with a tile of tokens, over one of `splits` parts of the input features.

    `WHOLE` is set if all tiles and steps of the weight are full. With several splits (`SPLIT`), the last program of a
    tile to finish adds up what all of them stored in `PARTS`.

    `FOLLOW` is set if the kernel may be launched while the previous one runs (programmatic dependent launch) and must
    wait for it before it reads `X`. The first `UNIT` of the weight need not wait (`AHEAD`): it is read while the inputs
    are being rounded. It is multiplied last, so that the loop's own reads start as soon as the inputs are there.
    """
    split, tile = tl.program_id(2), tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    f = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    k = tl.arange(0, STEP)
    # Parts are whole units, so that their borders do not depend on the step of a tiling.
    share = tl.cdiv(tl.cdiv(inner, UNIT), splits) * UNIT
    low = split * share
    high = tl.minimum(low + share, inner)
    live = (t < tokens)[None, :]
    w_at = W + f.to(tl.int64)[:, None] * w_stride + k[None, :]
    x_at = X + t.to(tl.int64)[None, :] * inner + k[:, None]
    acc = tl.zeros([FEATURES, TOKENS], tl.float32)
    ahead = tl.arange(0, UNIT)
    if AHEAD:
        first_w = tl.load(W + f.to(tl.int64)[:, None] * w_stride + ahead[None, :] + low, eviction_policy="evict_first")
    if FOLLOW:
        tl.extra.cuda.gdc_wait()
    if AHEAD:
        first_x = tl.load(X + t.to(tl.int64)[None, :] * inner + ahead[:, None] + low, live, 0.0)
        low += UNIT
    for start in range(low, high, STEP):
        if WHOLE:
            w = tl.load(w_at + start, eviction_policy="evict_first")
            x = tl.load(x_at + start, live, 0.0)
        else:
            inside = start + k < inner
            w = tl.load(w_at + start, inside[None, :] & (f < features)[:, None], 0.0)
            x = tl.load(x_at + start, live & inside[:, None], 0.0)
        acc = tl.dot(w, x, acc, max_num_imprecise_acc=EXACT_AFTER)
    if AHEAD:
        acc = tl.dot(first_w, first_x, acc, max_num_imprecise_acc=EXACT_AFTER)
    # All but the last program of a tile are done here.
    if SPLIT:
        parts = parts_of_tile(PARTS, tile, splits, FEATURES, TOKENS)
        if not is_last_part(acc, parts, COUNTS + tile, split, splits):
            return
        acc = add_parts(parts, splits, FEATURES, TOKENS)
    acc *= tl.load(W_SCALE + f, f < features, 0.0)[:, None]
    acc *= tl.load(X_SCALE + t, t < tokens, 0.0)[None, :]
    if HAS_BIAS:
        acc += tl.load(BIAS + f, f < features, 0.0).to(tl.float32)[:, None]
    out = OUT + t.to(tl.int64)[None, :] * features + f[:, None]
    tl.store(out, acc.to(OUT.dtype.element_ty), live & (f < features)[:, None])


def _choose_tiling(tokens: int, features: int) -> Tiling:
    """Choose the tiling by the numbers of tokens and output features, as measured on an H200.

    Layers with many features have tiles of one width for any number of tokens, since the number of parts depends on
    tiles.
    """
    many = features > MANY_FEATURES
    if tokens <= 16:
        return Tiling(16, 128, 128, 4, 4) if many else Tiling(16, 64, 128, 6, 4)
    if tokens <= 32:
        return Tiling(32, 128, 256, 3, 8) if many else Tiling(32, 64, 128, 6, 4)
    if tokens <= 64:
        return Tiling(64, 128, 256, 3, 8) if many else Tiling(64, 64, 128, 5, 4)
    return Tiling(128, 128, 128, 4, 8) if many else Tiling(128, 64, 128, 4, 4)


def float8_product(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    tiling: Tiling | None = None,
) -> Tensor:
    """Return `(x * x_scale) @ (weight * scale).T + bias`, `[T, F]`.

    Args:
        x: Inputs, `[T, D]` float8_e4m3fn.
        x_scale: Multiplier of each token, T float32 numbers.
        weight: Weight in the layout of `nn.Linear`, `[F, D]` float8_e4m3fn; rows need not be contiguous.
        scale: Multiplier of each row of it, `[F]` float32.
        bias: `[F]`; None for none.
        dtype: Dtype of the result.
        tiling: Tiling of the product; None for one that suits its size.
    """
    (tokens, inner), features = x.shape, len(weight)
    out = x.new_empty(tokens, features, dtype=dtype)
    if not out.numel():
        return out
    tiling = _choose_tiling(tokens, features) if tiling is None else tiling
    blocks, tiles = triton.cdiv(tokens, tiling.tokens), triton.cdiv(features, tiling.features)
    units = triton.cdiv(inner, UNIT.value)
    splits, parts = tiling.splits or choose_splits(tiles, units), out
    if splits > 1:
        if blocks > 1 and blocks * tiles > MAX_SPLIT_TILES:  # the number of counters is limited
            most = max(MAX_SPLIT_TILES // tiles, 1) * tiling.tokens
            pairs = zip(x.split(most), x_scale.split(most), strict=True)
            # With the same tiling, or the parts of these sums would differ from other calls'.
            return torch.cat([float8_product(*pair, weight, scale, bias, dtype, tiling) for pair in pairs])
        parts = x.new_empty(blocks * tiles * splits * tiling.features * tiling.tokens, dtype=torch.float32)
    follow = supports_dependent_launch(x.device)
    whole = features % tiling.features == 0 and inner % tiling.step == 0
    ahead = inner % UNIT.value == 0 and features % tiling.features == 0
    ahead &= (splits - 1) * triton.cdiv(units, splits) < units  # no part is empty
    _float8_product_kernel[(blocks, tiles, splits)](
        x, x_scale, weight, scale, bias, out, parts, finished_counts(x.device),
        tokens, features, inner, weight.stride(0), splits,
        TOKENS=tiling.tokens, FEATURES=tiling.features, STEP=tiling.step,
        WHOLE=whole, HAS_BIAS=bias is not None, SPLIT=splits > 1, AHEAD=ahead, FOLLOW=follow, launch_pdl=follow,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return out
