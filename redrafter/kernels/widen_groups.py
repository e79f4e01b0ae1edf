"""Dequantises grouped weights of 4 and 8 bits on a GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.grouped_weight import HALF, ZERO_CODE, GroupedWeight

BYTES = tl.constexpr(HALF)  # of a block of codes of 4 bits
ZERO = tl.constexpr(ZERO_CODE)


@triton.jit
def _widen_kernel(
    W, SCALE, MINIMUM, OUT, row, groups,
    BITS: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, HAS_MINIMUM: tl.constexpr,
):  # fmt: skip
    """Dequantise a part of one row of the weight."""
    f = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    IN_BYTE: tl.constexpr = 8 // BITS
    k = j // BYTES * (BYTES * IN_BYTE) + j % BYTES  # of 4 bits those in the low halves of bytes; high ones are 16 later
    codes = tl.load(W + f * row + j, j < row, 0)
    at = f * groups + k // GROUP
    scale = tl.load(SCALE + at, j < row, 0.0).to(tl.float32)
    for half in tl.static_range(IN_BYTE):
        number = codes.to(tl.float32) if BITS == 8 else (codes >> 4 if half else codes & 15).to(tl.float32)
        if BITS == 4 and not HAS_MINIMUM:
            number -= ZERO
        number *= scale
        if HAS_MINIMUM:
            number += tl.load(MINIMUM + at, j < row, 0.0).to(tl.float32)
        tl.store(OUT + f * row * IN_BYTE + k + half * BYTES, number.to(OUT.dtype.element_ty), j < row)


def widen_grouped(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """Return what `weight.dequantize(dtype)` does, `[F, D]`, without tensors in between."""
    features, row = weight.codes.shape
    out = torch.empty(weight.shape, dtype=dtype, device=weight.codes.device)
    if not out.numel():
        return out
    columns = min(triton.next_power_of_2(row), 2048)
    minimum = None if weight.minimum is None else weight.minimum.contiguous()
    _widen_kernel[(features, triton.cdiv(row, columns))](
        weight.codes.contiguous(), weight.scale.contiguous(), minimum, out, row, weight.scale.shape[1],
        BITS=weight.bits, GROUP=weight.group, COLUMNS=columns, HAS_MINIMUM=minimum is not None,
    )  # fmt: skip
    return out
