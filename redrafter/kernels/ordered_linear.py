"""Linear layers whose sums have one order: a token's output does not depend on the number of tokens.

Every output is one sum over the input features, in ascending order, in a float32 accumulator of the tensor cores. Tiles
vary with the number of tokens, so that a product is about as fast as torch's; the order of a sum does not.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.launch import Tiling, supports_dependent_launch

EXPERTS = Tiling(16, 64, 128, 4, 4)  # for the few tokens of each expert


@triton.jit(do_not_specialize=["tokens"])
def _ordered_linear_kernel(
    X, W, BIAS, OUT, tokens, features, inner,
    TOKENS: tl.constexpr, FEATURES: tl.constexpr, STEP: tl.constexpr, WHOLE: tl.constexpr, HAS_BIAS: tl.constexpr,
    FOLLOW: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of tokens with a tile of the weight, over all input features.

    `WHOLE` says that the weight has no tile or step that is less than whole, `FOLLOW` what `supports_dependent_launch`
    says.
    """
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    f = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    k = tl.arange(0, STEP)
    x_at = X + t.to(tl.int64)[:, None] * inner + k[None, :]
    w_at = W + f.to(tl.int64)[None, :] * inner + k[:, None]
    live = (t < tokens)[:, None]
    acc = tl.zeros([TOKENS, FEATURES], tl.float32)
    if FOLLOW:
        tl.extra.cuda.gdc_wait()
    # Never split over programs: the order of the sum would then depend on the tiling, and so on the number of tokens.
    for start in range(0, inner, STEP):
        if WHOLE:
            w = tl.load(w_at + start)
            x = tl.load(x_at + start, live, 0.0)
        else:
            inside = start + k < inner
            w = tl.load(w_at + start, inside[:, None] & (f < features)[None, :], 0.0)
            x = tl.load(x_at + start, live & inside[None, :], 0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(BIAS + f, f < features, 0.0).to(tl.float32)[None, :]
    at = OUT + t.to(tl.int64)[:, None] * features + f[None, :]
    tl.store(at, acc.to(OUT.dtype.element_ty), live & (f < features)[None, :])


@triton.jit
def _ordered_expert_linear_kernel(
    X, W, ROWS, ENDS, TILES, OUT, features, inner, w_expert, w_feature, w_inner,
    EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr,
    STEP: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of one expert's rows with a tile of its weight, over all input features.

    `ROWS` are the rows sorted by expert, `ENDS` the number of them up to the end of each expert's, and `TILES` the same
    in tiles.
    """
    if FOLLOW:
        tl.extra.cuda.gdc_wait()
    tile = tl.program_id(0)
    e = tl.arange(0, BLOCK_EXPERTS)
    ends = tl.load(TILES + e, e < EXPERTS, 0x7FFFFFFF)
    # Programs are launched for the maximum number of tiles: counts are known only on the device.
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    if expert >= EXPERTS:
        return
    before = tl.maximum(expert - 1, 0)
    first_tile = tl.where(expert > 0, tl.load(TILES + before), 0)
    first_row = tl.where(expert > 0, tl.load(ENDS + before), 0)
    t = first_row + (tile - first_tile) * TOKENS + tl.arange(0, TOKENS)
    live = t < tl.load(ENDS + expert)
    row = tl.load(ROWS + t, live, 0)
    f = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    k = tl.arange(0, STEP)
    x_at = X + row[:, None] * inner + k[None, :]
    w_at = W + expert.to(tl.int64) * w_expert + f.to(tl.int64)[None, :] * w_feature + k.to(tl.int64)[:, None] * w_inner
    acc = tl.zeros([TOKENS, FEATURES], tl.float32)
    for start in range(0, inner, STEP):
        inside = start + k < inner
        w = tl.load(w_at + start * w_inner, inside[:, None] & (f < features)[None, :], 0.0)
        x = tl.load(x_at + start, live[:, None] & inside[None, :], 0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    at = OUT + row[:, None] * features + f[None, :]
    tl.store(at, acc.to(OUT.dtype.element_ty), live[:, None] & (f < features)[None, :])


def _choose_tiling(tokens: int, features: int, half: bool) -> Tiling:
    """Choose the tiling by size, as measured on an H200; all of them sum in the same order."""
    if not half:
        return Tiling(16, 32, 32, 2, 4)
    size = 0 if features < 6144 else 1 if features < 16384 else 2
    if tokens <= 16:
        return (Tiling(16, 32, 256, 6, 4), Tiling(16, 64, 128, 6, 4), Tiling(16, 64, 256, 3, 4))[size]
    if tokens <= 64:
        return (Tiling(64, 32, 128, 6, 4), Tiling(64, 64, 64, 8, 4), Tiling(64, 64, 64, 6, 4))[size]
    if tokens <= 128:
        return (Tiling(64, 64, 64, 8, 4), Tiling(64, 128, 64, 6, 4), Tiling(128, 128, 64, 4, 8))[size]
    if tokens <= 256 and size == 0:
        return Tiling(64, 128, 64, 6, 4)
    return Tiling(128, 128, 64, 4, 8)


def ordered_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, tiling: Tiling | None = None) -> Tensor:
    """Return `x @ weight.T + bias`, `[T, F]`.

    Args:
        x: Inputs, `[T, D]`.
        weight: Weight in the layout of `nn.Linear`, `[F, D]`.
        bias: `[F]`; None for none.
        tiling: Tiling of the product; None for one that suits its size. It changes no bit.
    """
    tokens, inner = x.shape
    features = weight.shape[0]
    tiling = _choose_tiling(tokens, features, x.element_size() == 2) if tiling is None else tiling
    out = x.new_empty(tokens, features)
    if not out.numel():
        return out
    follow = supports_dependent_launch(x.device)
    _ordered_linear_kernel[(triton.cdiv(tokens, tiling.tokens), triton.cdiv(features, tiling.features))](
        x.contiguous(), weight.contiguous(), bias, out, tokens, features, inner,
        TOKENS=tiling.tokens, FEATURES=tiling.features, STEP=tiling.step,
        WHOLE=features % tiling.features == 0 and inner % tiling.step == 0, HAS_BIAS=bias is not None,
        FOLLOW=follow, launch_pdl=follow, num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return out


def ordered_expert_linear(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    """Return the product of each row with the weight of its expert, `[R, F]`, with the bits of `ordered_linear`.

    No value is read on the host.

    Args:
        x: Inputs, `[R, D]`.
        weight: Weights of E experts, `[E, F, D]`, of any strides.
        expert: The expert of each row, `[R]` int64.
    """
    (rows, inner), (experts, features, _) = x.shape, weight.shape
    out = x.new_empty(rows, features)
    if not out.numel():
        return out
    tiling = EXPERTS if x.element_size() == 2 else Tiling(16, 32, 32, 2, 4)
    counts = (expert[:, None] == torch.arange(experts, device=expert.device)).sum(0)
    ends, tiles = counts.cumsum(0).int(), (-(-counts // tiling.tokens)).cumsum(0).int()
    # An upper bound from the shapes alone, so that the host does not wait for the counts.
    most = min(rows, experts) + rows // tiling.tokens  # tiles of all experts together
    follow = supports_dependent_launch(x.device)
    _ordered_expert_linear_kernel[(most, triton.cdiv(features, tiling.features))](
        x.contiguous(), weight, expert.argsort(stable=True), ends, tiles, out, features, inner, *weight.stride(),
        EXPERTS=experts, BLOCK_EXPERTS=triton.next_power_of_2(experts), TOKENS=tiling.tokens, FEATURES=tiling.features,
        STEP=tiling.step, FOLLOW=follow, launch_pdl=follow, num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return out


# A library of matrix products chooses a kernel by the shape. Most of these sum as `ordered_linear` does, over all input
# features in ascending order; others split a long sum into parts. Comparing bits shows which of them do.
_KNOWN: dict[tuple[object, ...], bool] = {}


def torch_keeps_order(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether `torch_linear` gives the bits of `ordered_linear` for such arguments.

    The comparison is made once for each shape and dtype. It is impossible during the capture of a CUDA graph, where
    unknown shapes return False.

    Args:
        x: Inputs, `[T, D]`, contiguous.
        weight: Weight, `[F, D]`, contiguous.
        bias: `[F]`; None for none.
    """
    # Libraries choose other kernels for unaligned tensors, and results are stored by shape only.
    if x.data_ptr() % 16 or weight.data_ptr() % 16:
        return False
    key = (x.device, x.dtype, *x.shape, len(weight), bias is None)
    if key not in _KNOWN:
        if torch.cuda.is_current_stream_capturing():
            return False
        _KNOWN[key] = _compare(x, weight, bias)
    return _KNOWN[key]


def torch_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias` by torch's product; not by `linear`, which a batch-invariant forward replaces."""
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def _compare(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Compare both products on sums that cancel except for rounding, and with a bias also on random numbers."""
    try:
        inputs, weights = _cancelling(x, weight)
        if bias is None:
            return _same_bits(inputs, weights, None)
        # Without a bias first, as it would hide small differences by rounding.
        return _same_bits(inputs, weights, torch.zeros_like(bias)) and _same_bits(_random(x), weights, _random(bias))
    except torch.cuda.OutOfMemoryError:
        return False


def _same_bits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    ours, theirs = ordered_linear(x, weight, bias), torch_linear(x, weight, bias)
    # All zeros would mean that nothing was compared.
    return bool(ours.any()) and torch.equal(ours, theirs)


def _random(like: Tensor) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(like.numel())
    return torch.empty_like(like).normal_(generator=generator)


def _cancelling(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return random inputs and a weight of these shapes, whose second half cancels the first.

    Only rounding errors are left in such sums, so almost every one of them reveals another order.
    """
    x, weight, half = _random(x), _random(weight), x.shape[1] // 2
    x[:, half : 2 * half], weight[:, half : 2 * half] = -x[:, :half], weight[:, :half]
    x[:, 2 * half :] = 0
    return x, weight
