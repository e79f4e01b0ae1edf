"""Read checkpoints whole into memory, so that later changes of a file change no tensor and end no process.

`safetensors.torch.load_file` and transformers map a file into memory instead. If it is truncated later, the process
ends by SIGBUS; if it is rewritten, tensors change that were checked before. A FIFO stops all threads of the process,
since safetensors opens it while it holds Python's lock. Here only regular files are opened, and no read holds the lock.
"""

import os
import pickle
from collections.abc import Mapping, Sequence
from io import BytesIO, FileIO
from math import prod
from pathlib import Path
from zipfile import is_zipfile

import psutil
import torch
from torch import Tensor

from redrafter.errors import CheckpointError, first_line
from redrafter.files.dtype_names import SAFETENSORS_CODES, SAFETENSORS_DTYPES
from redrafter.files.headers import open_safetensors, read_file_headers, read_headers
from redrafter.files.regular_file import Stamp, open_regular, read_regular, stamp_of

SUFFIX = ".safetensors"
READ_BYTES = 1 << 30  # per call, as Linux reads less than 2 GiB at once


def read_directory(directory: Path) -> dict[str, Tensor]:
    """Return the tensors that `save_pretrained` wrote into a directory, by name.

    Raises the errors of `read_headers` and `read_safetensors`.
    """
    return read_safetensors([*dict.fromkeys(header.file for header in read_headers(directory).values())])


def read_safetensors(files: Sequence[Path]) -> dict[str, Tensor]:
    """Return the tensors of some files by name, in memory that is independent of the files.

    Raises:
        CheckpointError: A file is not regular, is cut short, is not of the format, contains a tensor of another file,
            has more bytes than the machine has free memory, or was changed before all were read.
    """
    tensors: dict[str, Tensor] = {}
    stamps: dict[Path, Stamp] = {}
    for path in files:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            stamps[path], read = stamp_of(status), _read_tensors(path, file, status.st_size)
        if twice := tensors.keys() & read.keys():
            raise CheckpointError(f"{path} holds {min(twice)}, which another file of the checkpoint holds too")
        tensors |= read
    # After the last file, as the first one may be changed while the others are read.
    for path, stamp in stamps.items():
        if not path.exists() or stamp_of(path.stat()) != stamp:
            raise CheckpointError(f"{path} was changed while it was read: give it again once it is written")
    return tensors


def _read_tensors(path: Path, file: FileIO, size: int) -> dict[str, Tensor]:
    """Read the tensors of a file of `size` bytes."""
    places, total = [], 0
    # safetensors checks that tensors have the bytes of their shapes, and that these are all of the data, without gaps.
    for name, (_, shape, code) in read_file_headers(path).items():
        if (dtype := SAFETENSORS_DTYPES.get(code)) is None:
            raise CheckpointError(f"{path} holds {name} as {code}, which is not known here")
        places.append((name, dtype, shape, total, total := total + prod(shape) * dtype.itemsize))
    # Before the allocation, which Linux would grant and then end the process for.
    if size > (free := psutil.virtual_memory().available):
        message = f"{path} has {size / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of the machine's memory are free"
        raise CheckpointError(message)
    data = torch.empty(total, dtype=torch.uint8)
    file.seek(max(size - total, 0))
    view = memoryview(data.numpy().data)
    while view:
        if not (count := file.readinto(view[:READ_BYTES])):
            raise CheckpointError(f"{path} cannot be read: its {size} bytes became fewer while it was read")
        view = view[count:]
    # A view in another dtype needs an aligned offset, which the format does not promise.
    aligned = lambda part, dtype: part if part.storage_offset() % dtype.itemsize == 0 else part.clone()  # noqa: E731
    return {name: aligned(data[begin:end], dtype).view(dtype).view(shape) for name, dtype, shape, begin, end in places}


def read_pickle(path: Path, *, mapped: bool = False) -> dict[str, Tensor]:
    """Return the tensors by name that `torch.save` wrote, in memory, or mapped into it if the file is an archive.

    Raises:
        CheckpointError: It cannot be read, or holds anything but tensors on the CPU that safetensors could hold.
    """
    # `torch.load` opens a path itself, and would wait for the writer of a FIFO.
    archive = mapped and is_zipfile(path)  # others cannot be mapped
    content = path if archive else BytesIO(read_regular(path))
    try:
        tensors = torch.load(content, map_location="cpu", weights_only=True, mmap=archive)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors, and code in it would be run, so it is not loaded; save the state dict "
            "with safetensors"
        ) from error
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error
    if not isinstance(tensors, Mapping) or not all(
        isinstance(name, str)
        and isinstance(x, Tensor)
        and (x.layout, x.device.type) == (torch.strided, "cpu")
        and x.dtype in SAFETENSORS_CODES
        for name, x in tensors.items()
    ):
        raise CheckpointError(f"{path} is no flat state dict of tensors by name")
    return dict(tensors)


def map_tensor(file: Path, name: str) -> Tensor:
    """Return a tensor of a safetensors file that is mapped into memory: only its used parts are read."""
    with open_safetensors(file, "pt") as tensors:
        return tensors.get_tensor(name)
