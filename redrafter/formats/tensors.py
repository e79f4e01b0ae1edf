"""Tensors that are read from their files a few rows at a time, to convert a checkpoint of any size in little memory."""

import difflib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from torch import Tensor, nn

from redrafter.errors import ArgumentError, CheckpointError, UnsupportedError
from redrafter.files.checkpoint_kind import config_errors
from redrafter.files.dtype_names import SAFETENSORS_CODES, SAFETENSORS_DTYPES, dtype_name
from redrafter.files.headers import Header, read_file_headers, read_headers
from redrafter.files.stored_tensors import read_directory

WRITE_BLOCK_BYTES = 32 << 20  # in memory at once, about
MAX_FILE_BYTES = 5 << 30  # of a file of a model's weights


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read when it is written.

    Attributes:
        name: Its name in the source; the names of all parts for a tensor made of several.
        shape: Its shape.
        dtype: Its number format.
        read_rows: Reads the rows `[first:last]`. A tensor without dimensions has one row.
        read_factor: Rows' worth of memory that reading one row takes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read_rows: Callable[[int, int], Tensor]
    read_factor: int = 1

    @property
    def length(self) -> int:
        """Number of rows."""
        return self.shape[0] if self.shape else 1

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


def open_directory(directory: Path, *, whole: bool = False) -> dict[str, LazyTensor]:
    """Return the tensors of a directory that `save_pretrained` wrote: of one file, or of several and an index.

    With `whole` they are read into memory at once, as `read_directory` reads them.
    """
    if whole:
        return {name: memory_tensor(name, tensor) for name, tensor in read_directory(directory).items()}
    return {name: _file_tensor(name, header) for name, header in read_headers(directory).items()}


def open_file(file: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a safetensors file by their names; of the file, only the header is read."""
    return {name: _file_tensor(name, header) for name, header in read_file_headers(file).items()}


def _file_tensor(name: str, header: Header) -> LazyTensor:
    file, shape, code = header

    def read_rows(first: int, last: int) -> Tensor:
        with safe_open(file, framework="pt") as tensors:
            return tensors.get_slice(name)[first:last] if shape else tensors.get_tensor(name)

    # Only reading fails, so that a file with an unknown dtype can still be described.
    def refuse(first: int, last: int) -> Tensor:
        raise UnsupportedError(f"{file}: {name} is stored as {code}, which is not known here")

    dtype = SAFETENSORS_DTYPES.get(code)
    return LazyTensor(name, shape, dtype or torch.uint8, refuse if dtype is None else read_rows)


def check_tensors(
    make: Callable[[], nn.Module],
    actual: Mapping[str, LazyTensor],
    directory: Path,
    *,
    optional: Collection[str] = (),
    source_name: Callable[[str], str] = str,
) -> None:
    """Raise `CheckpointError` unless a checkpoint has the tensors, by name and shape, that its config asks for.

    Args:
        make: Makes the model or drafter that the config describes; it is given no memory.
        actual: The tensors by the source's names.
        directory: The checkpoint.
        optional: Names that may be missing.
        source_name: Returns the source's name of a tensor of the model.
    """
    # Shapes come from the module itself, without memory for its weights.
    with config_errors(directory, "model"), torch.device("meta"):
        state = make().state_dict()
    expected = {source_name(name): tuple(x.shape) for name, x in state.items()}
    expected = {name: shape for name, shape in expected.items() if name in actual or name not in optional}
    extra = [name for name in actual if name not in expected]
    for name, shape in expected.items():
        if name not in actual:
            near = difflib.get_close_matches(name, extra or list(actual), n=1, cutoff=0.0)
            hint = f"; the nearest that is there is {near[0]}" if near else ""
            raise CheckpointError(f"{directory} has no tensor {name}, which its config asks for{hint}")
        if actual[name].shape != shape:
            raise CheckpointError(f"{directory} has {name} of shape {actual[name].shape} instead of {shape}")
    if extra:
        raise CheckpointError(f"{directory} has a tensor {extra[0]}, which its config does not ask for")


def memory_tensor(name: str, tensor: Tensor) -> LazyTensor:
    """Return a lazy tensor of a tensor that is in memory already."""
    return LazyTensor(name, tuple(tensor.shape), tensor.dtype, lambda a, b: tensor[a:b] if tensor.dim() else tensor)


def cast(tensor: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    """Return a tensor in another number format; reading it raises `ArgumentError` if a number is too large for it."""

    def read_rows(first: int, last: int) -> Tensor:
        before = tensor.read_rows(first, last)
        after = before.to(dtype)
        # Counted, as numbers may have been infinite or NaN before.
        if after.isfinite().sum() < before.isfinite().sum():
            short = dtype_name(dtype)
            largest = before[before.isfinite()].abs().max()
            raise ArgumentError(f"{tensor.name} holds {largest:g}, too much for {short}: choose another --dtype")
        return after

    return tensor if tensor.dtype == dtype else replace(tensor, dtype=dtype, read_rows=read_rows)


def slice_rows(tensor: LazyTensor, first: int, last: int) -> LazyTensor:
    """Return the rows `tensor[first:last]`."""
    return replace(
        tensor, shape=(last - first, *tensor.shape[1:]), read_rows=lambda a, b: tensor.read_rows(first + a, first + b)
    )


def slice_columns(tensor: LazyTensor, first: int, last: int) -> LazyTensor:
    """Return the columns `tensor[:, first:last]`."""
    return replace(
        tensor,
        shape=(tensor.length, last - first),
        read_rows=lambda a, b: tensor.read_rows(a, b)[:, first:last],
        read_factor=-(-tensor.shape[1] // max(last - first, 1)),
    )


def concat_rows(parts: Sequence[LazyTensor]) -> LazyTensor:
    """Return tensors concatenated along their rows, which must match in shape and format."""

    def read_rows(first: int, last: int) -> Tensor:
        pieces, start = [], 0
        for part in parts:
            a, b = max(first - start, 0), min(last - start, part.length)
            if a < b:
                pieces.append(part.read_rows(a, b))
            start += part.length
        return torch.cat(pieces) if pieces else parts[0].read_rows(0, 0)

    _check_alike(parts, {(part.dtype, part.shape[1:]) for part in parts})
    shape = (sum(part.length for part in parts), *parts[0].shape[1:])
    return parts[0] if len(parts) == 1 else LazyTensor(_join_names(parts), shape, parts[0].dtype, read_rows)


def concat_columns(parts: Sequence[LazyTensor]) -> LazyTensor:
    """Return matrices concatenated along their columns, which must match in length and format."""
    _check_alike(parts, {(part.dtype, part.length, len(part.shape)) for part in parts})
    shape = (parts[0].length, sum(part.shape[1] for part in parts))
    read_rows = lambda a, b: torch.cat([part.read_rows(a, b) for part in parts], dim=1)  # noqa: E731
    return parts[0] if len(parts) == 1 else LazyTensor(_join_names(parts), shape, parts[0].dtype, read_rows)


def _check_alike(parts: Sequence[LazyTensor], kinds: set[Any]) -> None:
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


def write_safetensors(
    file: Path, tensors: Mapping[str, LazyTensor], progress: Callable[[int], object] = lambda count: None
) -> None:
    """Write a safetensors file, a block of rows at a time, and call `progress` with the bytes of each block."""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # which aligns every tensor
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor, offsets = tensors[name], [end, end := end + tensors[name].nbytes]
        code = SAFETENSORS_CODES[tensor.dtype]
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": offsets}
    head = json.dumps(header, separators=(",", ":")).encode()
    # The format pads the header so that the data begin at a multiple of 8 bytes.
    head += b" " * (-len(head) % 8)
    with file.open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        for name in order:
            tensor = tensors[name]
            # Blocks bound the memory; `read_factor` counts how much more than its result a read holds.
            step = max(WRITE_BLOCK_BYTES * tensor.length // max(tensor.nbytes * tensor.read_factor, 1), 1)
            for first in range(0, tensor.length, step):
                last = min(first + step, tensor.length)
                block = tensor.read_rows(first, last).contiguous()
                if block.dtype != tensor.dtype or block.shape not in ((last - first, *tensor.shape[1:]), tensor.shape):
                    raise CheckpointError(
                        f"{tensor.name} holds {list(block.shape)} {block.dtype} where its header says "
                        f"{list(tensor.shape)} {tensor.dtype}"
                    )
                progress(out.write(block.reshape(-1).view(torch.uint8).numpy().data))


def split_into_files(
    tensors: Mapping[str, LazyTensor],
) -> tuple[dict[str, dict[str, LazyTensor]], dict[str, Any] | None]:
    """Distribute a model's tensors over files of at most `MAX_FILE_BYTES`, as transformers names them.

    Returns:
        The tensors of each file, and the content of the index file; None if there is only one file.
    """
    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=MAX_FILE_BYTES,
    )
    files = {file: {name: tensors[name] for name in names} for file, names in split.filename_to_tensors.items()}
    return files, {"metadata": split.metadata, "weight_map": split.tensor_to_filename} if split.is_sharded else None


def _join_names(parts: Sequence[LazyTensor]) -> str:
    return ", ".join(dict.fromkeys(part.name for part in parts))
