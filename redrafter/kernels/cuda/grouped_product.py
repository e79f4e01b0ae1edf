"""Products of grouped weights on NVIDIA GPUs, by a kernel in CUDA C++."""

import ctypes
import functools
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from redrafter.kernels.cuda.compiled import Kernel, compiler
from redrafter.kernels.grouped_weight import GroupedWeight
from redrafter.kernels.launch import capability
from redrafter.kernels.linear import finished_counts

MAX_TOKENS = 64  # of a launch
MAX_FEW_TOKENS = 64  # from more on, it is as fast to dequantise the weight and to use torch's product
BLOCKS = 8  # of 16 bytes of a row, in a tile; the order of sums depends on it
TILE_BYTES = 16 * BLOCKS
WARP_FEATURES = 32  # output features of a warp
DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class WeightTiling(NamedTuple):
    """Describes how a product is divided into programs.

    Attributes:
        warps: Warps of a program, of 32 output features each.
        stages: Tiles of codes and inputs in shared memory.
        programs: Programs for which a multiprocessor has registers.
        splits: Programs that share the input features.
    """

    warps: int
    stages: int
    programs: int
    splits: int


def is_available(device: torch.device) -> bool:
    """Return whether a GPU can run the kernel."""
    return compiler() is not None and capability(device) >= (8, 0)


class _Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "codes", "scale", "minimum", "bias", "out", "parts", "counts")),
        *((name, ctypes.c_int) for name in ("tokens", "features", "inner", "stride", "groups", "group")),
    )


@functools.cache
def _kernel(device: int, stages: int, **macros: int) -> Kernel | None:
    """Return the kernel with as many stages as fit into shared memory; None where two do not."""
    if stages < 2:
        return None
    threads, source = WARP_FEATURES * macros["WARPS"], Path(__file__).with_suffix(".cu")
    constants = {"BLOCKS": BLOCKS, "STAGES": stages}
    kernel = Kernel(source, tuple((constants | macros).items()), threads, device)
    return kernel if kernel.fits else _kernel(device, stages - 1, **macros)


def scales_of_tile(weight: GroupedWeight) -> int:
    """Return how many scales of a row are copied as one word with each tile; 0 for numbers that are read one by one."""
    inputs, apart = TILE_BYTES * 8 // weight.bits, weight.scale.stride(0)
    count = max(inputs // weight.group, 1)
    numbers = [weight.scale] if weight.minimum is None else [weight.scale, weight.minimum]
    words = all(apart * part.element_size() % max(count * part.element_size(), 4) == 0 for part in numbers)
    whole = weight.shape[1] % inputs == 0 and (inputs % weight.group == 0 or weight.group % inputs == 0)
    return count if words and whole and count in (1, 2, 4, 8) else 0


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _aligned(tensor: Tensor) -> Tensor:
    """Return a tensor, or a copy, that can be copied asynchronously: row by row, or as a whole."""
    words = tensor.stride(0) * tensor.element_size() % 16 == 0 and tensor.stride(1) == 1
    tensor = tensor if words else tensor.contiguous()
    return tensor.clone(memory_format=torch.contiguous_format) if tensor.data_ptr() % 16 else tensor


def _aligned_weight(weight: GroupedWeight) -> GroupedWeight:
    codes, scale, minimum = _aligned(weight.codes), _aligned(weight.scale), weight.minimum
    if minimum is not None and (minimum := _aligned(minimum)).stride() != scale.stride():
        scale, minimum = scale.contiguous(), minimum.contiguous()
    return GroupedWeight(codes, scale, minimum)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _choose_tiling(tokens: int, weight: GroupedWeight, device: torch.device) -> WeightTiling:
    tiles = math.ceil(len(weight.codes) / (8 * WARP_FEATURES))
    splits = max(min(_multiprocessors(device) // tiles, 8, math.ceil(weight.codes.shape[1] / TILE_BYTES)), 1)
    return WeightTiling(4, 3, 2, splits) if tokens <= 16 else WeightTiling(8, 3, 1, splits)


def multiply(
    x: Tensor, weight: GroupedWeight, bias: Tensor | None = None, tiling: WeightTiling | None = None
) -> Tensor:
    """Return `x @ weight.T + bias`, `[T, F]`, in the dtype of `x`.

    Args:
        x: Inputs, `[T, D]`.
        weight: Weight, `[F, D]`.
        bias: `[F]`; None for none.
        tiling: Tiling of the product; None for one that suits its size.
    """
    (tokens, inner), (features, _), device = x.shape, weight.shape, x.device
    most = MAX_TOKENS if x.element_size() == 2 else MAX_TOKENS // 2
    if tokens > most:
        return torch.cat([multiply(part, weight, bias, tiling) for part in x.split(most)])
    out = x.new_empty(tokens, features)
    if not out.numel():
        return out
    x, weight = _aligned(x.contiguous()), _aligned_weight(weight)
    codes, scale, minimum = weight.codes, weight.scale, weight.minimum
    tiling = tiling or _choose_tiling(tokens, weight, device)
    scales, kinds = scales_of_tile(weight), [x, scale, minimum, bias]
    names = zip(("X", "SCALE", "MINIMUM", "BIAS"), kinds, strict=True)
    token_tiles = 1 << max(math.ceil(tokens / 8) - 1, 0).bit_length()
    kernel = _kernel(
        device.index, tiling.stages, BITS=weight.bits, TILES=token_tiles, WARPS=tiling.warps,
        PROGRAMS=tiling.programs, PER=scales or BLOCKS, WHOLE=scales > 0,
        **{name: -1 if part is None else DTYPES[part.dtype] for name, part in names},
    )  # fmt: skip
    if kernel is None:  # for so many tokens
        return torch.cat([multiply(part, weight, bias, tiling) for part in x.split(4 * token_tiles)])
    tiles = math.ceil(features / (WARP_FEATURES * tiling.warps))
    parts = None
    if tiling.splits > 1:
        size = tiles * tiling.splits * WARP_FEATURES * tiling.warps * 8 * token_tiles
        parts = out.new_empty(size, dtype=torch.float32)
    arguments = _Arguments(
        _address(x), _address(codes), _address(scale), _address(minimum), _address(bias), _address(out),
        _address(parts), _address(finished_counts(device)), tokens, features, inner,
        codes.stride(0), scale.stride(0), weight.group,
    )  # fmt: skip
    kernel.launch((tiling.splits, tiles), arguments)
    return out
