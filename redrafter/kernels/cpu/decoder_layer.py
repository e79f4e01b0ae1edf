"""Decoder layers over few tokens on a CPU, each one call of a kernel in C instead of forty of torch's operators."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from redrafter.kernels.cpu.grouped_product import MAX_FEW_TOKENS, MAX_INNER, UNITS, load

MAX_TOKENS = MAX_FEW_TOKENS
MAX_SLOTS = 1 << 15  # whose scores for a few queries are on a thread's stack
MULTIPLE = 16  # of which the widths of heads and of float32 rows are multiples
ROWS = 4  # output features that a product computes at once


def _fields(**names: str) -> list[tuple[str, Any]]:
    return [(name, getattr(ctypes, kind)) for kind, listed in names.items() for name in listed.split()]


class Linear(ctypes.Structure):
    """A weight and its bias, by their addresses: `struct linear` of the kernel."""

    _fields_ = _fields(
        c_void_p="codes scale minimum bias", c_size_t="features inner group", c_int="bits wide_scale wide_minimum"
    )

    @classmethod
    def of_layer(
        cls, codes: Tensor, scale: Tensor | None, minimum: Tensor | None, bias: Tensor | None
    ) -> "Linear | None":
        """Return a weight for the kernel, None for one that it cannot compute.

        Args:
            codes: The codes of a `GroupedWeight`, or a weight in float32.
            scale: Scales of its groups; None for a weight in float32.
            minimum: Minima of its groups, or None.
            bias: Bias, or None.
        """
        tensors, unit = [x for x in (codes, scale, minimum, bias) if x is not None], UNITS.get(codes.dtype, MULTIPLE)
        if any(not x.is_cpu or not x.is_contiguous() for x in tensors):
            return None
        if (scale is None and codes.dtype != torch.float32) or (bias is not None and bias.dtype != torch.float32):
            return None
        features, inner = codes.shape[0], codes.shape[1] << (codes.dtype == torch.uint8)
        group = inner if scale is None else inner // scale.shape[1]
        if features % ROWS or group % unit or inner > MAX_INNER:
            return None
        bits, wide = codes.shape[1] * codes.itemsize * 8 // inner, [_is_wide(x) for x in (scale, minimum)]
        return cls(*map(address, (codes, scale, minimum, bias)), features, inner, group, bits, *wide)


class Layer(ctypes.Structure):
    """A decoder layer: `struct layer` of the kernel."""

    _fields_ = [
        *((name, Linear) for name in ("query", "key", "value", "output", "gate", "up", "down")),
        *_fields(c_void_p="before_attention before_mlp of_queries of_keys", c_size_t="heads group width"),
        *_fields(c_float="epsilon offset scale"),
    ]

    @property
    def memory(self) -> int:
        """Numbers that the kernel keeps of each token in between."""
        return int(self.query.inner + 2 * (self.query.features + self.key.features + self.gate.features))


class Forward(ctypes.Structure):
    """A call of layers: `struct forward` of the kernel, which sets the last four fields."""

    _fields_ = _fields(
        c_void_p="layers pools outs x cos sin mask buffer sums slots",
        c_size_t="depth rows nodes window capacity rope_row mask_row mask_node",
        c_int="threads",
    ) + _fields(c_void_p="layer keys values out")


def _is_wide(x: Tensor | None) -> bool:
    return x is not None and x.dtype == torch.float32


def address(x: Tensor | None) -> int | None:
    """Return the address of a tensor's numbers, None for no tensor."""
    return None if x is None else x.data_ptr()


@functools.cache
def find_kernel() -> Callable[[int], None] | None:
    """Return the kernel, a function of the address of a `Forward`; None where there is none."""
    if (library := load()) is None:
        return None
    library.decoder_layer.argtypes, library.decoder_layer.restype = [ctypes.c_void_p], None
    kernel: Callable[[int], None] = library.decoder_layer
    return kernel
