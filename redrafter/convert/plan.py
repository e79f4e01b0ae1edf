"""What a conversion will write: known whole before anything is written."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

from redrafter.convert.tensors import Stored, size, write
from redrafter.errors import CheckpointError
from redrafter.files.dtype_names import dtype_name

__all__ = ["Plan"]

BLOCK = 16 << 20  # bytes copied at once
SPARE = 64 << 20  # bytes of a disk that are left free


@dataclass(frozen=True)
class Plan:
    """weights: files of tensors. copies: files that are taken as they are, weights as hard links where the file system
    allows it, unless `copy`. texts: JSON files, written last and in their order, so that what was begun does not load.
    notes: what a person should know. Names are relative to the output."""

    weights: dict[str, dict[str, Stored]] = field(default_factory=dict)
    copies: dict[str, Path] = field(default_factory=dict)
    texts: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    copy: bool = False

    def bytes(self, output: Path) -> int:
        """That will be written, links not counted."""
        own = sum(size(tensor) for tensors in self.weights.values() for tensor in tensors.values())
        return own + sum(file.stat().st_size for file in self.copies.values() if not self._links(file, output))

    def check_space(self, output: Path) -> None:
        """Raise `CheckpointError` when the disk has no room for it."""
        there = next(each for each in output.absolute().parents if each.exists())
        need, free = self.bytes(output), shutil.disk_usage(there).free
        if need + SPARE > free:
            raise CheckpointError(
                f"{output} will take {need / 1e9:.1f} GB, and {there} has {free / 1e9:.1f} GB free; make room or name "
                "another place"
            )

    def fill(self, folder: Path, progress: Callable[[int], object], workers: int = 1) -> None:
        """Write everything into a folder that is not there yet. workers: files of tensors written at once."""
        for name in (*self.weights, *self.copies, *self.texts):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        late = {"config.json"} & self.copies.keys()
        for name in self.copies.keys() - late:
            self._take(self.copies[name], folder / name, progress)
        self._write(folder, progress, workers)
        for name in late:
            self._take(self.copies[name], folder / name, progress)
        for name, text in self.texts.items():
            (folder / name).write_text(json.dumps(text, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def _write(self, folder: Path, progress: Callable[[int], object], workers: int) -> None:
        stopped = Event()

        def told(count: int) -> None:
            if stopped.is_set():
                raise InterruptedError("stopped")
            progress(count)

        with ThreadPoolExecutor(workers) as pool:
            writing = [pool.submit(write, folder / name, tensors, told) for name, tensors in self.weights.items()]
            try:
                for each in writing:
                    each.result()
            except BaseException:
                stopped.set()  # those that are being written, too
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def key_map(self) -> Iterator[tuple[str, str, str, str]]:
        """Of each tensor its name there, its name here, its shape and its dtype, and first what is taken as it is."""
        for name, source in self.copies.items():
            yield str(source), name, "as it is", ""
        for file, tensors in self.weights.items():
            for name, tensor in tensors.items():
                shape, dtype = str(list(tensor.shape)), dtype_name(tensor.dtype)
                yield tensor.name, f"{file}: {name}", shape, dtype

    def _links(self, file: Path, output: Path) -> bool:
        there = next(each for each in output.absolute().parents if each.exists())
        return not self.copy and _is_weights(file) and file.resolve().stat().st_dev == there.stat().st_dev

    def _take(self, source: Path, target: Path, progress: Callable[[int], object]) -> None:
        if not self.copy and _is_weights(source):
            try:
                os.link(source.resolve(), target)  # the hub's cache is made of symbolic links
                return
            except OSError:
                pass  # another file system, or one without hard links
        with source.open("rb") as from_, target.open("wb") as to:
            while block := from_.read(BLOCK):
                progress(to.write(block))


def _is_weights(file: Path) -> bool:
    return file.suffix in (".safetensors", ".bin", ".pt")
