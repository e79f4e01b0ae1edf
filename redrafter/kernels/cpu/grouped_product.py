"""Products of grouped weights on a CPU, by a kernel in C."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from redrafter.kernels.cpu.compiled import load_library

MAX_FEW_TOKENS = 64  # from 100 on, it is as fast to dequantise the weight and to use torch's product
MAX_INNER = 1 << 16  # input features, of which a thread has four rows on its stack
MIN_FEATURES = 4  # output features that the kernel computes at once
UNITS = {torch.uint8: 32, torch.int8: 16}  # input features that it dequantises at once
DTYPES = {torch.float32, torch.bfloat16, torch.float16}  # of inputs
MIN_SHARED = 1 << 17  # numbers of a weight that is worth a second thread
MAX_TILE = 1 << 26  # numbers of a weight that are dequantised at once
_ARGUMENTS = [ctypes.c_void_p] * 6 + [ctypes.c_size_t] * 4 + [ctypes.c_int] * 4

Kernel = Callable[..., None]


def load() -> ctypes.CDLL | None:
    """Return the library, compiled in the first call on a machine; None, after a warning, where it cannot be."""
    return load_library(Path(__file__).with_name("decoder_layer.c"))  # which includes this kernel


@functools.cache
def find_kernel() -> Kernel | None:
    """Return the kernel; None where there is no library."""
    if (library := load()) is None:
        return None
    library.grouped_product.argtypes, library.grouped_product.restype = _ARGUMENTS, None
    return library.grouped_product


def multiply(x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Return `x @ weight.T + bias`, `[..., F]`, with the arguments of `grouped_linear`; None if the kernel cannot.

    Up to `MAX_FEW_TOKENS`, sums are in float32, and the bits of a token do not depend on the other tokens.
    """
    # A small product takes as few microseconds as these lines do, so that no conversion is called in vain.
    features, (*outer, inner), dtype, kernel = codes.shape[0], x.shape, x.dtype, find_kernel()
    if kernel is None or features < MIN_FEATURES or inner > MAX_INNER or dtype not in DTYPES:
        return None
    if inner // scale.shape[1] % UNITS[codes.dtype] or codes.shape[1] << (codes.dtype is torch.uint8) != inner:
        return None
    # The kernel reads addresses: torch's product refuses codes and biases that are too short or on another device.
    if not codes.is_cpu or (bias is not None and bias.shape[0] != features):
        return None
    if not codes.is_contiguous():  # some of the input features
        codes, scale = codes.contiguous(), scale.contiguous()
        minimum = None if minimum is None else minimum.contiguous()
    tokens = x.numel() // inner
    if tokens > MAX_FEW_TOKENS:
        return _multiply_dequantized(kernel, x, codes, scale, minimum, bias)
    out, is_wide = torch.empty((*outer, features)), dtype is torch.float32
    if tokens:
        wide = (x if is_wide else x.float()).contiguous()
        _call(kernel, tokens, wide, codes, scale, minimum, None if bias is None else bias.float(), out)
    return out if is_wide else out.to(dtype)


def multiplies_bfloat16() -> bool:
    """Return whether the CPU has instructions for products in bfloat16, which are else slower than in float32."""
    native: bool = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()  # noqa: SLF001
    return native


def _multiply_dequantized(
    kernel: Kernel, x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor | None, bias: Tensor | None
) -> Tensor:
    features, inner = len(codes), x.shape[-1]
    dtype = torch.bfloat16 if x.dtype == torch.bfloat16 and multiplies_bfloat16() else torch.float32
    wide_x = x.to(dtype)
    tiles, parts = -(-features * inner // MAX_TILE), []
    for tile in range(tiles):  # of one size, so that none has too few rows for the kernel
        rows = slice(features * tile // tiles, features * (tile + 1) // tiles)
        wide = torch.empty(rows.stop - rows.start, inner)
        _call(kernel, 0, None, codes[rows], scale[rows], None if minimum is None else minimum[rows], None, wide)
        parts.append(linear(wide_x, wide.to(dtype), None if bias is None else bias[rows].to(dtype)))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)).to(x.dtype)


def _call(
    kernel: Kernel, tokens: int, x: Tensor | None, codes: Tensor, scale: Tensor, minimum: Tensor | None,
    bias: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    """Write the product to `out`, or the weight if there is no `x`; all are contiguous."""
    (features, width), bits = codes.shape, 4 if codes.dtype is torch.uint8 else 8
    inner = width * 8 // bits
    kernel(
        None if x is None else x.data_ptr(), codes.data_ptr(), scale.data_ptr(),
        None if minimum is None else minimum.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
        tokens, features, inner, inner // scale.shape[1], bits, scale.dtype is torch.float32,
        minimum is not None and minimum.dtype is torch.float32,
        torch.get_num_threads() if features * inner >= MIN_SHARED else 1,
    )  # fmt: skip
