"""Tensors that are read from their files a few rows at a time, to convert a checkpoint of any size in little memory."""

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
    "SAFETENSORS_CODES",
    "SAFETENSORS_DTYPES",
    "LazyTensor",
    "byte_size",
    "cast",
    "concat_columns",
    "concat_rows",
    "file_tensor",
    "memory_tensor",
    "pad_rows",
    "slice_columns",
    "slice_rows",
    "split_into_files",
    "write_safetensors",
]

# Names of number formats in a file, from https://github.com/huggingface/safetensors, "Format".
SAFETENSORS_DTYPES = {
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
SAFETENSORS_CODES = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}
WRITE_BLOCK_BYTES = 32 << 20  # in memory at once, about
MAX_FILE_BYTES = 5 << 30  # of a file of a model's weights


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read when it is written.

    Attributes:
        name: Its name in the source; the names of all parts for a tensor made of several.
        shape: Its shape.
        dtype: Its number format.
        read: Reads the rows `[first:last]`. A tensor without dimensions has one row.
        read_factor: Rows' worth of memory that reading one row takes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]
    read_factor: int = 1

    @property
    def length(self) -> int:
        """Number of rows."""
        return self.shape[0] if self.shape else 1


def file_tensor(file: Path, name: str, shape: tuple[int, ...], code: str) -> LazyTensor:
    """Return a tensor of a safetensors file; reading it raises `UnsupportedError` for an unknown number format.

    Args:
        file: The file.
        name: Name of the tensor in the file.
        shape: Its shape, from the file's header.
        code: Its number format, as the header names it.
    """

    def read(first: int, last: int) -> Tensor:
        with safe_open(file, framework="pt") as tensors:
            return tensors.get_slice(name)[first:last] if shape else tensors.get_tensor(name)

    def refuse(first: int, last: int) -> Tensor:
        raise UnsupportedError(f"{file}: {name} is stored as {code}, which is not known here")

    known = code in SAFETENSORS_DTYPES
    return LazyTensor(name, shape, SAFETENSORS_DTYPES.get(code, torch.uint8), read if known else refuse)


def memory_tensor(name: str, tensor: Tensor) -> LazyTensor:
    """Return a lazy tensor of a tensor that is in memory already."""
    return LazyTensor(name, tuple(tensor.shape), tensor.dtype, lambda a, b: tensor[a:b] if tensor.dim() else tensor)


def cast(tensor: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    """Return a tensor in another number format; reading it raises `ArgumentError` if a number is too large for it."""

    def read(first: int, last: int) -> Tensor:
        before = tensor.read(first, last)
        after = before.to(dtype)
        if after.isfinite().sum() < before.isfinite().sum():
            short = dtype_name(dtype)
            largest = before[before.isfinite()].abs().max()
            raise ArgumentError(f"{tensor.name} holds {largest:g}, too much for {short}: choose another --dtype")
        return after

    return tensor if tensor.dtype == dtype else replace(tensor, dtype=dtype, read=read)


def slice_rows(tensor: LazyTensor, first: int, last: int) -> LazyTensor:
    """Return the rows `tensor[first:last]`."""
    return replace(tensor, shape=(last - first, *tensor.shape[1:]), read=lambda a, b: tensor.read(first + a, first + b))


def slice_columns(tensor: LazyTensor, first: int, last: int) -> LazyTensor:
    """Return the columns `tensor[:, first:last]`."""
    return replace(
        tensor,
        shape=(tensor.length, last - first),
        read=lambda a, b: tensor.read(a, b)[:, first:last],
        read_factor=-(-tensor.shape[1] // max(last - first, 1)),
    )


def concat_rows(parts: Sequence[LazyTensor]) -> LazyTensor:
    """Return tensors concatenated along their rows; raise `CheckpointError` if their shapes or formats do not match."""

    def read(first: int, last: int) -> Tensor:
        pieces, start = [], 0
        for part in parts:
            a, b = max(first - start, 0), min(last - start, part.length)
            if a < b:
                pieces.append(part.read(a, b))
            start += part.length
        return torch.cat(pieces) if pieces else parts[0].read(0, 0)

    _check_alike(parts, {(part.dtype, part.shape[1:]) for part in parts})
    shape = (sum(part.length for part in parts), *parts[0].shape[1:])
    return parts[0] if len(parts) == 1 else LazyTensor(_join_names(parts), shape, parts[0].dtype, read)


def concat_columns(parts: Sequence[LazyTensor]) -> LazyTensor:
    """Return matrices concatenated along their columns; raise `CheckpointError` if their sizes do not match."""
    _check_alike(parts, {(part.dtype, part.length, len(part.shape)) for part in parts})
    shape = (parts[0].length, sum(part.shape[1] for part in parts))
    read = lambda a, b: torch.cat([part.read(a, b) for part in parts], dim=1)  # noqa: E731
    return parts[0] if len(parts) == 1 else LazyTensor(_join_names(parts), shape, parts[0].dtype, read)


def _check_alike(parts: Sequence[LazyTensor], kinds: Collection[object]) -> None:
    if len(kinds) > 1:
        shapes = ", ".join(f"{list(part.shape)} {dtype_name(part.dtype)}" for part in parts)
        raise CheckpointError(f"{_join_names(parts)} cannot be put together: {shapes}")


def pad_rows(tensor: LazyTensor, length: int) -> LazyTensor:
    """Return a tensor with rows of zeros appended until it has `length` rows."""
    missing = (length - tensor.length, *tensor.shape[1:])
    if missing[0] == 0:
        return tensor
    zeros = memory_tensor(tensor.name, torch.zeros(1, dtype=tensor.dtype).expand(missing))
    return replace(concat_rows([tensor, zeros]), name=tensor.name)


def byte_size(tensor: LazyTensor) -> int:
    """Return the size of a tensor in bytes."""
    return prod(tensor.shape) * tensor.dtype.itemsize


def write_safetensors(
    file: Path, tensors: Mapping[str, LazyTensor], progress: Callable[[int], object] = lambda count: None
) -> None:
    """Write a safetensors file, a block of rows at a time.

    Args:
        file: The file to write.
        tensors: Tensors by their names in the file.
        progress: Gets the number of bytes after each block is written.

    Raises:
        CheckpointError: When a tensor is not what the header of its source says.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # which aligns every tensor
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor = tensors[name]
        offsets = [end, end := end + byte_size(tensor)]
        code = SAFETENSORS_CODES[tensor.dtype]
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": offsets}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with file.open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        for name in order:
            tensor = tensors[name]
            step = max(WRITE_BLOCK_BYTES * tensor.length // max(byte_size(tensor) * tensor.read_factor, 1), 1)
            for first in range(0, tensor.length, step):
                last = min(first + step, tensor.length)
                block = tensor.read(first, last).contiguous()
                _check_block(block, tensor, last - first)
                progress(out.write(block.reshape(-1).view(torch.uint8).numpy().data))


def _check_block(block: Tensor, tensor: LazyTensor, length: int) -> None:
    """Raise `CheckpointError` unless a block of rows has the shape and the format that the header says."""
    if block.dtype != tensor.dtype or tuple(block.shape) not in ((length, *tensor.shape[1:]), tensor.shape):
        raise CheckpointError(
            f"{tensor.name} holds {list(block.shape)} {block.dtype} where its header says "
            f"{list(tensor.shape)} {tensor.dtype}"
        )


def split_into_files(
    tensors: Mapping[str, LazyTensor],
) -> tuple[dict[str, dict[str, LazyTensor]], dict[str, Any] | None]:
    """Distribute a model's tensors over files of at most `MAX_FILE_BYTES`, as transformers names them.

    Returns:
        The tensors of each file, and the content of the index file; None if there is only one file.
    """
    parts: list[dict[str, LazyTensor]] = [{}]
    for name, tensor in tensors.items():
        if parts[-1] and sum(map(byte_size, parts[-1].values())) + byte_size(tensor) > MAX_FILE_BYTES:
            parts.append({})
        parts[-1][name] = tensor
    if len(parts) == 1:
        return {WEIGHTS_FILE: parts[0]}, None
    files = {f"model-{number:05d}-of-{len(parts):05d}.safetensors": part for number, part in enumerate(parts, 1)}
    weight_map = {name: file for file, part in files.items() for name in part}
    return files, {"metadata": {"total_size": sum(map(byte_size, tensors.values()))}, "weight_map": weight_map}


def _join_names(parts: Sequence[LazyTensor]) -> str:
    return ", ".join(dict.fromkeys(part.name for part in parts))
