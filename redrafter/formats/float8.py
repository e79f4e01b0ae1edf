"""Weights of quantised drafters, read as the products of small numbers and their scales.

`redrafter.model.packed_weights` reads integers of 4 and 8 bits. FP8 weights are in the formats of compressed-tensors
(`float-quantized`), of transformers' `fp8` and of ModelOpt. Each weight `NAME.weight` in float8_e4m3fn has
`NAME.weight_scale` or `NAME.weight_scale_inv`: one scale for all of it, one for each row, or one for each block. A
drafter computes in the dtype that the rest of it has, and inputs are not rounded, so that scales of inputs are not
read. Other quantised weights are refused by name.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redrafter.errors import CheckpointError, UnsupportedError, first_line
from redrafter.files.checkpoint_kind import read_json, scheme_name
from redrafter.files.dtype_names import dtype_name
from redrafter.formats.tensors import StoredTensor, Tensors, empty, memory_tensor
from redrafter.model.packed_weights import find_layout, widen_packed
from redrafter.model.quantized_layers import multiply_blocks

_KEYS = ("quantization_config", "compression_config")  # of config.json; the second is older
_MODELOPT_FILE = "hf_quant_config.json"
_SCALES = ("weight_scale", "weight_scale_inv")
_OF_INPUTS = ("input_scale", "activation_scale")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def read_quantized(
    config: Mapping[str, Any], tensors: Tensors, directory: Path
) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Return the config without its quantisation, and the tensors with such weights as numbers of the drafter's dtype.

    Both are the same where nothing is quantised.

    Raises:
        UnsupportedError: Weights are quantised in another way.
        CheckpointError: A weight has no scale, or one of another shape.
    """
    unquantized = {key: value for key, value in config.items() if key not in _KEYS}
    settings = next((config[key] for key in _KEYS if config.get(key)), None)
    if settings is None and (directory / _MODELOPT_FILE).is_file():
        settings = read_json(directory / _MODELOPT_FILE).get("quantization")
    if settings is None:
        return unquantized, dict(tensors)
    dtypes = (x.dtype for name, x in tensors.items() if name.endswith("norm.weight") and x.dtype in _FLOATS)
    dtype, read = next(dtypes, torch.bfloat16), dict[str, StoredTensor]()
    try:
        block = _block_size(settings)
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{directory} has settings of a quantisation that cannot be read ({first_line(error)}): {settings!r:.200}"
        ) from error
    if find_layout(settings) is not None:  # which is read whole, as several tensors become one
        wide = widen_packed({name: x.read() for name, x in tensors.items()}, settings, directory)
        return unquantized, {name: memory_tensor(name, x) for name, x in wide.items()}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        scale = next((tensors[f"{layer}.{scale}"] for scale in _SCALES if f"{layer}.{scale}" in tensors), None)
        if kind in _OF_INPUTS or (kind in _SCALES and tensor.dtype in _FLOATS):
            continue
        if kind == "weight" and tensor.dtype == torch.float8_e4m3fn:
            if scale is None:
                raise CheckpointError(f"{directory} has {name} in 8 bits, and no {layer}.{_SCALES[0]}")
            read[name] = _scaled(tensor, scale, block, dtype, directory)
        elif scale is not None or tensor.dtype not in (*_FLOATS, torch.int64, torch.bool):
            raise UnsupportedError(
                f"{directory} is quantised ({scheme_name(settings)}: {name} is {dtype_name(tensor.dtype)}), and of "
                "quantised drafters only FP8 and packed weights are read: give the drafter that it was made from; "
                "--draft-quantization fp8 rounds its weights to 8 bits when it is loaded"
            )
        else:
            read[name] = tensor
    return unquantized, read


def _block_size(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale where scales are of blocks; None where nothing says it."""
    groups = settings.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in (groups.values() if isinstance(groups, Mapping) else groups)]
    sizes = [settings.get("weight_block_size"), *(group.get("block_structure") for group in weights)]
    sizes += [[1, group["group_size"]] for group in weights if group.get("group_size")]
    known = {tuple(map(int, size)) for size in sizes if size}
    rows, columns = known.pop() if len(known) == 1 else (0, 0)
    return (rows, columns) if rows > 0 < columns else None


def _scaled(
    weight: StoredTensor, scale: StoredTensor, block: tuple[int, int] | None, dtype: torch.dtype, directory: Path
) -> StoredTensor:
    """Return the product of a weight `[M, N]` and its scales: one, `[M]` or `[M, 1]`, or those of blocks."""
    if len(weight.shape) != 2:
        raise UnsupportedError(f"{directory} has {weight.name} in 8 bits, which is no matrix, and is not read")
    rows, columns = weight.shape
    if math.prod(scale.shape) == 1:
        shared = (rows, columns)
    elif scale.shape in ((rows,), (rows, 1)):
        shared = (1, columns)
    elif block is not None and scale.shape == (math.ceil(rows / block[0]), math.ceil(columns / block[1])):
        shared = block
    else:
        raise CheckpointError(
            f"{directory} has {scale.name} of shape {scale.shape}, which are no scales of all, of the rows, or of the "
            f"blocks of {weight.name} of shape {weight.shape}"
        )

    def dequantize() -> Tensor:
        scales = scale.read().float().view(math.ceil(rows / shared[0]), -1)
        if not scales.isfinite().all():
            raise CheckpointError(f"{directory} has numbers that are not finite in {scale.name}")
        return multiply_blocks(weight.read(), scales, shared).to(dtype)

    return StoredTensor(weight.name, empty(weight.shape, dtype), dequantize)
