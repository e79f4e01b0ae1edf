"""A linear layer whose sums have one order: the output of a token does not depend on how many tokens there are.

Every output is one sum over the input features, in ascending order, in a float32 accumulator of the tensor cores. Tiles
differ by the number of tokens, so that a product is about as fast as torch's; the order of a sum does not.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.launch import supports_dependent_launch

__all__ = ["ordered_linear"]


class Tiling(NamedTuple):
    """How a product is cut into programs.

    Attributes:
        tokens: Tokens per program.
        features: Output features per program.
        step: Input features that are loaded at once.
        stages: Loads under way at once.
        warps: Warps of a program.
    """

    tokens: int
    features: int
    step: int
    stages: int
    warps: int


@triton.jit(do_not_specialize=["tokens"])
def _ordered_linear_kernel(
    X, W, BIAS, OUT, tokens, features, inner,
    TOKENS: tl.constexpr, FEATURES: tl.constexpr, STEP: tl.constexpr, WHOLE: tl.constexpr, HAS_BIAS: tl.constexpr,
    FOLLOW: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of tokens with a tile of the weight, over all input features.

    `WHOLE` says that the weight has no tile or step that is less than whole. `FOLLOW` says that the kernel may be
    launched before the previous one is done (programmatic dependent launch) and must wait for it before it reads `X`.
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


def _choose_tiling(tokens: int, features: int, half: bool) -> Tiling:
    """Choose the tiling by size, as measured on an H200.

    All of them have 64 tokens or more: a tile of fewer is multiplied by another instruction of the tensor cores.

    Args:
        tokens: Tokens of the product.
        features: Output features.
        half: Whether the numbers have two bytes.
    """
    if not half:
        return Tiling(64, 32, 32, 2, 4)
    if tokens <= 64:
        return Tiling(64, 32, 128, 5, 4)
    if tokens <= 512:
        return Tiling(128, 64, 64, 4, 4)
    return Tiling(128, 128, 64, 4, 8)


def ordered_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, tiling: Tiling | None = None) -> Tensor:
    """Return `x @ weight.T + bias`, `[T, F]`.

    Args:
        x: Inputs, `[T, D]`.
        weight: Weight as `nn.Linear` has it, `[F, D]`, contiguous.
        bias: `[F]`; None for none.
        tiling: How the product is cut; None for what suits its size. It changes no bit.
    """
    tokens, inner = x.shape
    features = weight.shape[0]
    tiling = _choose_tiling(tokens, features, x.element_size() == 2) if tiling is None else tiling
    out = x.new_empty(tokens, features)
    if not tokens:
        return out
    follow = supports_dependent_launch(x.device)
    _ordered_linear_kernel[(triton.cdiv(tokens, tiling.tokens), triton.cdiv(features, tiling.features))](
        x.contiguous(), weight, bias, out, tokens, features, inner,
        TOKENS=tiling.tokens, FEATURES=tiling.features, STEP=tiling.step,
        WHOLE=features % tiling.features == 0 and inner % tiling.step == 0, HAS_BIAS=bias is not None,
        FOLLOW=follow, launch_pdl=follow, num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return out
