"""Read files named by users without waiting for a writer: only regular files."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from redrafter.errors import CheckpointError, first_line

Stamp = tuple[int, int, int, int, int]


@contextmanager
def open_regular(path: Path) -> Iterator[FileIO]:
    """Open a regular file to read it, in a context in which errors of reading become `CheckpointError`.

    Raises:
        CheckpointError: It cannot be read, or is a FIFO, a device, a socket or a directory.
    """

    def open_at_once(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))  # opening a FIFO would wait for a writer otherwise

    try:
        with open(path, "rb", buffering=0, opener=open_at_once) as file:
            # Checked on the open file, as the path may be replaced after a check by name.
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CheckpointError(f"{path} cannot be read: it is not a regular file, but a device or a pipe")
            yield file
    except (OSError, ValueError) as error:  # ValueError: NUL in a name
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file; raise as `open_regular` does."""
    with open_regular(path) as file:
        return file.readall()


def stamp_of(status: os.stat_result) -> Stamp:
    """Return attributes of a file that change when it is written or replaced."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
