"""The files that a conversion will write, all known before anything is written."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

from redrafter.convert.tensors import LazyTensor, byte_size, write_safetensors
from redrafter.errors import CheckpointError
from redrafter.files.dtype_names import dtype_name

__all__ = ["ConversionPlan", "link_or_copy"]

COPY_BLOCK_BYTES = 16 << 20  # read and written at once
MIN_FREE_BYTES = 64 << 20  # of the disk, after the conversion


@dataclass(frozen=True)
class ConversionPlan:
    """The files that a conversion writes, by their names relative to the output directory.

    Attributes:
        weights: Tensors of each safetensors file.
        copies: Source of each file that is taken unchanged; weight files become hard links if the file system can.
        json_files: Content of each JSON file. They are written last and in this order, so that an unfinished directory
            does not load.
        notes: Messages for the user.
        copy: Whether to copy weight files that could be hard links.
    """

    weights: dict[str, dict[str, LazyTensor]] = field(default_factory=dict)
    copies: dict[str, Path] = field(default_factory=dict)
    json_files: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    copy: bool = False

    def bytes_to_write(self, output: Path) -> int:
        """Return the bytes of weights and copies that will be written to a directory, without hard links."""
        written = sum(byte_size(tensor) for tensors in self.weights.values() for tensor in tensors.values())
        return written + sum(file.stat().st_size for file in self.copies.values() if not self._can_link(file, output))

    def check_space(self, output: Path) -> None:
        """Raise `CheckpointError` when the disk of the output directory has too little free space."""
        parent = _existing_parent(output)
        need, free = self.bytes_to_write(output), shutil.disk_usage(parent).free
        if need + MIN_FREE_BYTES > free:
            raise CheckpointError(
                f"{output} will take {need / 1e9:.1f} GB, and {parent} has {free / 1e9:.1f} GB free; make room or name "
                "another place"
            )

    def write(self, folder: Path, progress: Callable[[int], object], workers: int = 1) -> None:
        """Write all files into a new directory.

        Args:
            folder: The directory.
            progress: Gets the number of bytes whenever some are written.
            workers: Files of tensors to write at once.
        """
        for name in (*self.weights, *self.copies, *self.json_files):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        late = {"config.json"} & self.copies.keys()  # without it the directory does not load
        for name in self.copies.keys() - late:
            link_or_copy(self.copies[name], folder / name, progress, self.copy)
        self._write_weights(folder, progress, workers)
        for name in late:
            link_or_copy(self.copies[name], folder / name, progress, self.copy)
        for name, content in self.json_files.items():
            (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def _write_weights(self, folder: Path, progress: Callable[[int], object], workers: int) -> None:
        stopped = Event()

        def count_or_stop(count: int) -> None:
            if stopped.is_set():
                raise InterruptedError("stopped")
            progress(count)

        with ThreadPoolExecutor(workers) as pool:
            writing = [
                pool.submit(write_safetensors, folder / name, tensors, count_or_stop)
                for name, tensors in self.weights.items()
            ]
            try:
                for future in writing:
                    future.result()
            except BaseException:
                stopped.set()  # the other workers end at their next block
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def key_map(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield the source, the new name, the shape and the dtype of each copied file and of each tensor."""
        for name, source in self.copies.items():
            yield str(source), name, "as it is", ""
        for file, tensors in self.weights.items():
            for name, tensor in tensors.items():
                shape, dtype = str(list(tensor.shape)), dtype_name(tensor.dtype)
                yield tensor.name, f"{file}: {name}", shape, dtype

    def _can_link(self, file: Path, output: Path) -> bool:
        same_disk = file.resolve().stat().st_dev == _existing_parent(output).stat().st_dev
        return not self.copy and _is_weights(file) and same_disk


def link_or_copy(source: Path, destination: Path, progress: Callable[[int], object], copy: bool) -> None:
    """Make a hard link to a file of weights, or copy the file.

    Args:
        source: The file; the target of a symbolic link is linked, since the hub's cache is made of these.
        destination: The new name.
        progress: Gets the number of bytes after each block is copied.
        copy: Whether to copy a file of weights too.
    """
    if not copy and _is_weights(source):
        try:
            os.link(source.resolve(), destination)
            return
        except OSError:
            pass  # another file system, or one without hard links
    with source.open("rb") as reader, destination.open("wb") as writer:
        while block := reader.read(COPY_BLOCK_BYTES):
            progress(writer.write(block))


def _existing_parent(path: Path) -> Path:
    return next(parent for parent in path.absolute().parents if parent.exists())


def _is_weights(file: Path) -> bool:
    return file.suffix in (".safetensors", ".bin", ".pt")
