"""Tensors in files, read a few rows at a time, so that a checkpoint of any size is converted in little memory."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from redrafter.checkpoints.headers import WEIGHTS_FILE
from redrafter.errors import ArgumentError, CheckpointError, UnsupportedError
from redrafter.files.dtype_names import dtype_name

__all__ = [
    "DTYPES",
    "Stored",
    "beside",
    "cast",
    "columns",
    "held",
    "joined",
    "of_file",
    "padded",
    "rows",
    "shards",
    "size",
    "write",
]

# https://github.com/huggingface/safetensors, "Format"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
BLOCK = 32 << 20  # bytes that are in memory at once, about
SHARD = 5 << 30  # bytes of a file of a model's weights, at most


@dataclass(frozen=True)
class Stored:
    """A tensor that is read when it is written. name: its name where it comes from; of what was put together, the
    names. read: its rows from one to before another; a tensor without dimensions has one row."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]
    fetched: int = 1  # rows' worth that is in memory for each row of it

    @property
    def length(self) -> int:
        return self.shape[0] if self.shape else 1


def of_file(file: Path, name: str, shape: tuple[int, ...], code: str) -> Stored:
    """A tensor of a safetensors file. Reading raises `UnsupportedError` for a number format that is not known."""

    def read(first: int, last: int) -> Tensor:
        with safe_open(file, framework="pt") as tensors:
            return tensors.get_slice(name)[first:last] if shape else tensors.get_tensor(name)

    def unknown(first: int, last: int) -> Tensor:
        raise UnsupportedError(f"{file}: {name} is stored as {code}, which is not known here")

    return Stored(name, shape, DTYPES.get(code, torch.uint8), read if code in DTYPES else unknown)


def held(name: str, tensor: Tensor) -> Stored:
    """A tensor in memory."""
    return Stored(name, tuple(tensor.shape), tensor.dtype, lambda a, b: tensor[a:b] if tensor.dim() else tensor)


def cast(tensor: Stored, dtype: torch.dtype) -> Stored:
    """In another number format. Reading raises `ArgumentError` where a number is too large for it."""

    def read(first: int, last: int) -> Tensor:
        before = tensor.read(first, last)
        after = before.to(dtype)
        if after.isfinite().sum() < before.isfinite().sum():
            short = dtype_name(dtype)
            worst = before[before.isfinite()].abs().max()
            raise ArgumentError(f"{tensor.name} holds {worst:g}, too much for {short}: choose another --dtype")
        return after

    return tensor if tensor.dtype == dtype else replace(tensor, dtype=dtype, read=read)


def rows(tensor: Stored, first: int, last: int) -> Stored:
    """`[first:last]`."""
    return replace(tensor, shape=(last - first, *tensor.shape[1:]), read=lambda a, b: tensor.read(first + a, first + b))


def columns(tensor: Stored, first: int, last: int) -> Stored:
    """`[:, first:last]`."""
    return replace(
        tensor,
        shape=(tensor.length, last - first),
        read=lambda a, b: tensor.read(a, b)[:, first:last],
        fetched=-(-tensor.shape[1] // max(last - first, 1)),
    )


def joined(parts: Sequence[Stored]) -> Stored:
    """One below the other."""

    def read(first: int, last: int) -> Tensor:
        found, start = [], 0
        for part in parts:
            a, b = max(first - start, 0), min(last - start, part.length)
            if a < b:
                found.append(part.read(a, b))
            start += part.length
        return torch.cat(found) if found else parts[0].read(0, 0)

    _check_alike(parts, {(part.dtype, part.shape[1:]) for part in parts})
    whole = (sum(part.length for part in parts), *parts[0].shape[1:])
    return parts[0] if len(parts) == 1 else Stored(_names(parts), whole, parts[0].dtype, read)


def beside(parts: Sequence[Stored]) -> Stored:
    """One to the right of the other."""
    _check_alike(parts, {(part.dtype, part.length, len(part.shape)) for part in parts})
    whole = (parts[0].length, sum(part.shape[1] for part in parts))
    read = lambda a, b: torch.cat([part.read(a, b) for part in parts], dim=1)  # noqa: E731
    return parts[0] if len(parts) == 1 else Stored(_names(parts), whole, parts[0].dtype, read)


def _check_alike(parts: Sequence[Stored], kinds: Collection[object]) -> None:
    if len(kinds) > 1:
        shown = ", ".join(f"{list(part.shape)} {str(part.dtype).removeprefix('torch.')}" for part in parts)
        raise CheckpointError(f"{_names(parts)} cannot be put together: {shown}")


def padded(tensor: Stored, length: int) -> Stored:
    """With rows of zeros up to a length."""
    rest = (length - tensor.length, *tensor.shape[1:])
    if rest[0] == 0:
        return tensor
    zeros = held(tensor.name, torch.zeros(1, dtype=tensor.dtype).expand(rest))
    return replace(joined([tensor, zeros]), name=tensor.name)


def size(tensor: Stored) -> int:
    """Bytes."""
    return prod(tensor.shape) * tensor.dtype.itemsize


def write(file: Path, tensors: Mapping[str, Stored], progress: Callable[[int], object] = lambda count: None) -> None:
    """Write a safetensors file, a block of rows at a time. progress: told how many bytes were written."""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # so that all are aligned
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name in order:
        tensor = tensors[name]
        offsets = [place, place := place + size(tensor)]
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with file.open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        for name in order:
            tensor = tensors[name]
            step = max(BLOCK * tensor.length // max(size(tensor) * tensor.fetched, 1), 1)
            for first in range(0, tensor.length, step):
                last = min(first + step, tensor.length)
                block = tensor.read(first, last).contiguous()
                if block.dtype != tensor.dtype or tuple(block.shape) not in (
                    (last - first, *tensor.shape[1:]),
                    tensor.shape,
                ):
                    raise CheckpointError(
                        f"{tensor.name} holds {list(block.shape)} {block.dtype} where its header says "
                        f"{list(tensor.shape)} {tensor.dtype}"
                    )
                progress(out.write(block.reshape(-1).view(torch.uint8).numpy().data))


def shards(tensors: Mapping[str, Stored]) -> tuple[dict[str, dict[str, Stored]], dict[str, Any] | None]:
    """A model's tensors by the files that transformers looks for, and their index when there are several."""
    parts: list[dict[str, Stored]] = [{}]
    for name, tensor in tensors.items():
        if parts[-1] and sum(map(size, parts[-1].values())) + size(tensor) > SHARD:
            parts.append({})
        parts[-1][name] = tensor
    if len(parts) == 1:
        return {WEIGHTS_FILE: parts[0]}, None
    files = {f"model-{number:05d}-of-{len(parts):05d}.safetensors": part for number, part in enumerate(parts, 1)}
    weight_map = {name: file for file, part in files.items() for name in part}
    return files, {"metadata": {"total_size": sum(map(size, tensors.values()))}, "weight_map": weight_map}


def _names(parts: Sequence[Stored]) -> str:
    return ", ".join(dict.fromkeys(part.name for part in parts))
