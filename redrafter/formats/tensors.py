"""Tensors of a checkpoint that are read one at a time, when they are written: a large one takes little memory."""

import difflib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor, nn
from torch.nn.functional import pad

from redrafter.errors import ArgumentError, CheckpointError, UnsupportedError
from redrafter.files.checkpoint_kind import config_errors
from redrafter.files.dtype_names import SAFETENSORS_CODES, SAFETENSORS_DTYPES, dtype_name
from redrafter.files.headers import Header
from redrafter.files.stored_tensors import map_tensor

WRITE_BYTES = 32 << 20  # written at once, between two calls of `progress`
MAX_FILE_BYTES = 5 << 30  # of a file of a model's weights


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is read when it is written.

    Attributes:
        name: Its name in the source; the names of all parts for a tensor made of several.
        meta: A tensor without memory of its shape and dtype.
        read: Reads it. Tensors of files are mapped into memory, so that only what is used is read.
    """

    name: str
    meta: Tensor
    read: Callable[[], Tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.meta.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Its number format."""
        return self.meta.dtype

    def map(self, function: Callable[[Tensor], Tensor]) -> "StoredTensor":
        """Return the result of a function of the tensor, which is called when it is read, and once without memory."""
        return replace(self, meta=function(self.meta), read=lambda: function(self.read()))


Tensors = Mapping[str, StoredTensor]


def stored_tensors(headers: Mapping[str, Header]) -> dict[str, StoredTensor]:
    """Return the tensors with these headers by their names; of the files, nothing else is read yet."""

    def map_stored(name: str, file: Path, code: str) -> Tensor:
        # Only reading fails, so that a file with an unknown dtype can still be described.
        if code not in SAFETENSORS_DTYPES:
            raise UnsupportedError(f"{file}: {name} is stored as {code}, which is not known here")
        return map_tensor(file, name)

    metas = {name: empty(x.shape, SAFETENSORS_DTYPES.get(x.code, torch.uint8)) for name, x in sorted(headers.items())}
    return {
        name: StoredTensor(name, meta, partial(map_stored, name, headers[name].file, headers[name].code))
        for name, meta in metas.items()
    }


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor without memory."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def memory_tensor(name: str, tensor: Tensor) -> StoredTensor:
    """Return a tensor that is in memory already."""
    return StoredTensor(name, empty(tensor.shape, tensor.dtype), lambda: tensor)


def check_tensors(
    make: Callable[[], nn.Module],
    actual: Mapping[str, StoredTensor],
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


def cast(tensor: StoredTensor, dtype: torch.dtype) -> StoredTensor:
    """Return a tensor in another number format; reading it raises `ArgumentError` if a number is too large for it."""

    def convert(before: Tensor) -> Tensor:
        after = before.to(dtype)
        # Counted, as numbers may have been infinite or NaN before.
        if not before.is_meta and after.isfinite().sum() < before.isfinite().sum():
            short = dtype_name(dtype)
            largest = before[before.isfinite()].abs().max()
            raise ArgumentError(f"{tensor.name} holds {largest:g}, too much for {short}: choose another --dtype")
        return after

    return tensor if tensor.dtype == dtype else tensor.map(convert)


def concat(parts: Sequence[StoredTensor], dim: int) -> StoredTensor:
    """Return tensors concatenated along a dimension, which must match in all others and in format."""
    if len(parts) == 1:
        return parts[0]
    name = ", ".join(dict.fromkeys(part.name for part in parts))
    if len({(part.dtype, part.shape[:dim], part.shape[dim + 1 :], len(part.shape) > dim) for part in parts}) > 1:
        shapes = ", ".join(f"{list(part.shape)} {dtype_name(part.dtype)}" for part in parts)
        raise CheckpointError(f"{name} cannot be put together: {shapes}")
    join = lambda tensors: torch.cat(tensors, dim)  # noqa: E731
    return StoredTensor(name, join([part.meta for part in parts]), lambda: join([part.read() for part in parts]))


def pad_rows(tensor: StoredTensor, length: int) -> StoredTensor:
    """Return a tensor with rows of zeros appended until it has `length` rows."""
    missing = length - tensor.shape[0]
    return tensor.map(lambda x: pad(x, [0, 0] * (x.dim() - 1) + [0, missing])) if missing else tensor


def write_safetensors(file: Path, tensors: Tensors, progress: Callable[[int], object] = lambda _: None) -> None:
    """Write a safetensors file, a tensor at a time, and call `progress` with the bytes of each block of it."""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # which aligns every tensor
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor, offsets = tensors[name], [end, end := end + tensors[name].meta.nbytes]
        code = SAFETENSORS_CODES[tensor.dtype]
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": offsets}
    head = json.dumps(header, separators=(",", ":")).encode()
    # The format pads the header so that the data begin at a multiple of 8 bytes.
    head += b" " * (-len(head) % 8)
    with file.open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        for tensor in map(tensors.__getitem__, order):
            content = tensor.read().contiguous()
            if (content.dtype, content.shape) != (tensor.dtype, tensor.meta.shape):
                raise CheckpointError(
                    f"{tensor.name} holds {list(content.shape)} {content.dtype} where its header says "
                    f"{list(tensor.shape)} {tensor.dtype}"
                )
            for block in content.reshape(-1).view(torch.uint8).split(WRITE_BYTES):
                progress(out.write(block.numpy().data))


def split_into_files(tensors: Tensors) -> tuple[dict[str, dict[str, StoredTensor]], dict[str, Any] | None]:
    """Distribute a model's tensors over files of at most `MAX_FILE_BYTES`, as transformers names them.

    Returns:
        The tensors of each file, and the content of the index file; None if there is only one file.
    """
    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.meta.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=MAX_FILE_BYTES,
    )
    files = {file: {name: tensors[name] for name in names} for file, names in split.filename_to_tensors.items()}
    return files, {"metadata": split.metadata, "weight_map": split.tensor_to_filename} if split.is_sharded else None
