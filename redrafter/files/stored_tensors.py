"""Read checkpoints whole into memory, so that later changes of a file change no tensor and end no process.

`safetensors.torch.load_file` and transformers map a file into memory instead. If it is truncated later, the process
ends by SIGBUS; if it is rewritten, tensors change that were checked before. A FIFO stops all threads of the process,
since safetensors opens it while it holds Python's lock. Here only regular files are opened, and no read holds the lock.
"""

import json
import os
from collections.abc import Sequence
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

from redrafter.errors import CheckpointError, first_line
from redrafter.files.dtype_names import SAFETENSORS_DTYPES
from redrafter.files.headers import INDEX_FILE, WEIGHTS_FILE, weight_files
from redrafter.files.regular_file import open_regular

SUFFIX = ".safetensors"
MAX_HEADER_BYTES = 32 << 20  # parsing holds Python's lock; the header of 100,000 tensors has 12 MB
READ_BYTES = 1 << 30  # per call, as Linux reads less than 2 GiB at once


class _Stamp(NamedTuple):
    """Attributes of a file that change when its content does."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int

    @classmethod
    def from_stat(cls, status: os.stat_result) -> "_Stamp":
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def read_directory(directory: Path) -> dict[str, Tensor]:
    """Return the tensors that `save_pretrained` wrote into a directory, by name.

    Raises:
        CheckpointError: There are none, or not all of them, or they cannot be read.
    """
    files, indexed = weight_files(directory)
    if not files:
        raise CheckpointError(f"{directory} has no {WEIGHTS_FILE}; save the model with save_pretrained")
    tensors = read_safetensors(files)
    if missing := indexed - tensors.keys():
        raise CheckpointError(f"{directory / INDEX_FILE} names tensors that no file has: {min(missing)}")
    return tensors


def read_safetensors(files: Sequence[Path]) -> dict[str, Tensor]:
    """Return the tensors of some files by name, in memory that is independent of the files.

    Raises:
        CheckpointError: A file is not regular, is cut short, is not of the format, contains a tensor of another file,
            has more bytes than the machine has free memory, or was changed before all were read.
    """
    tensors: dict[str, Tensor] = {}
    stamps: dict[Path, _Stamp] = {}
    for path in files:
        with open_regular(path) as file:
            stamps[path] = _Stamp.from_stat(os.fstat(file.fileno()))
            read = _read_tensors(path, file, stamps[path].size)
        if twice := tensors.keys() & read.keys():
            raise CheckpointError(f"{path} holds {min(twice)}, which another file of the checkpoint holds too")
        tensors |= read
    # After the last file, as the first one may be changed while the others are read.
    for path, stamp in stamps.items():
        if not path.exists() or _Stamp.from_stat(path.stat()) != stamp:
            raise CheckpointError(f"{path} was changed while it was read: give it again once it is written")
    return tensors


def _read_tensors(path: Path, file: FileIO, size: int) -> dict[str, Tensor]:
    """Read the tensors of a file of `size` bytes: https://github.com/huggingface/safetensors, "Format"."""

    def read_into(data: Any) -> None:
        view = memoryview(data)
        while view:
            if not (count := file.readinto(view[:READ_BYTES])):
                raise _wrong(path, f"its {size} bytes became fewer while it was read")
            view = view[count:]

    if size < 8:
        raise _wrong(path, f"it has {size} bytes")
    read_into(length := bytearray(8))
    header_bytes = int.from_bytes(length, "little")
    if header_bytes > min(size - 8, MAX_HEADER_BYTES):
        raise _wrong(path, f"it has {size} bytes, and its header states a length of {header_bytes}")
    read_into(head := bytearray(header_bytes))
    places = _parse_header(path, bytes(head), size - 8 - header_bytes)
    # Before the allocation, which Linux would grant and then end the process for.
    if size > (free := psutil.virtual_memory().available):
        raise CheckpointError(
            f"{path} has {size / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of the machine's memory are free"
        )
    data = torch.empty(size - 8 - header_bytes, dtype=torch.uint8)
    read_into(data.numpy().data)
    tensors = {}
    for name, (dtype, shape, begin, end) in places.items():
        part = data[begin:end]
        # A view in another dtype needs an aligned offset, which the format does not promise.
        aligned = part if begin % dtype.itemsize == 0 else part.clone()
        tensors[name] = aligned.view(dtype).view(shape)
    return tensors


def _parse_header(path: Path, head: bytes, data_bytes: int) -> dict[str, tuple[torch.dtype, list[int], int, int]]:
    """Return the dtype, shape, first and last offset of each tensor, which together cover all data."""
    try:
        header = json.loads(head)
    except (ValueError, RecursionError) as error:
        raise _wrong(path, f"its header is not valid JSON ({first_line(error)})") from error
    if not isinstance(header, dict):
        raise _wrong(path, "its header is not a JSON object")
    header.pop("__metadata__", None)
    places = {}
    for name, entry in header.items():
        try:
            code, shape, (begin, end) = entry["dtype"], list(entry["shape"]), entry["data_offsets"]
            whole = all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end))
        except (KeyError, TypeError, ValueError):
            whole = False
        if not whole:
            raise _wrong(path, f"its header has no dtype, shape and data_offsets of {name}")
        dtype = SAFETENSORS_DTYPES.get(code)
        if dtype is None:
            raise CheckpointError(f"{path} holds {name} as {code}, which is not known here")
        if end - begin != prod(shape) * dtype.itemsize:
            raise _wrong(path, f"{name} of shape {shape} as {code} has {end - begin} bytes")
        places[name] = dtype, shape, begin, end
    expected = 0
    # The format allows neither gaps nor overlaps, which would hide data or alias tensors.
    for name, (_, _, begin, end) in sorted(places.items(), key=lambda item: item[1][2:]):
        if begin != expected:
            raise _wrong(path, f"the bytes of {name} begin at {begin} instead of {expected}")
        expected = end
    if expected != data_bytes:
        raise _wrong(path, f"its tensors have {expected} bytes, and {data_bytes} are there")
    return places


def _wrong(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read: it is cut short or no safetensors file: {what}")
