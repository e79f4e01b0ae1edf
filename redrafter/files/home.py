"""The folder with this library's results and compiled kernels of a machine."""

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redrafter.errors import ReDrafterError
from redrafter.files.atomic_file import write_atomically
from redrafter.files.regular_file import read_regular

HOME = "REDRAFTER_HOME"  # environment variable that names another folder
KERNELS = "TORCHINDUCTOR_CACHE_DIR"  # environment variable by which torch.compile finds its kernels
TRITON_KERNELS = "TRITON_CACHE_DIR"  # environment variable by which Triton finds its kernels


def home() -> Path:
    """Return `$REDRAFTER_HOME`, or `~/.cache/redrafter`."""
    return Path(os.environ.get(HOME) or Path.home() / ".cache" / "redrafter")


def read_kept(path: Path) -> bytes:
    """Return the content of a file in `home`; nothing where it cannot be read, as a pipe could not without waiting."""
    with suppress(ReDrafterError):
        return read_regular(path)
    return b""


def write_kept(path: Path, content: str | bytes) -> None:
    """Write a file in `home`, unless something else is in its place or the folder cannot be written to."""
    with suppress(OSError, RuntimeError, ReDrafterError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() or not path.exists():  # a pipe would be waited for
            write_atomically(path, content)


@dataclass(frozen=True)
class KeptResults:
    """A JSON file in `home` with results, each under the digest of what decides it.

    Attributes:
        name: Name of the file.
        most: Number of results that are kept: those that were written last.
    """

    name: str
    most: int = 256

    @staticmethod
    def digest(decides: object) -> str:
        """Return the digest of objects of JSON."""
        return hashlib.sha256(json.dumps(decides).encode()).hexdigest()

    def read_all(self) -> dict[str, Any]:
        """Return all results, the oldest first; none where the file cannot be read."""
        with suppress(RuntimeError, ValueError, RecursionError):
            results = json.loads(read_kept(home() / self.name))
            return results if isinstance(results, dict) else {}
        return {}

    def write(self, digest: str, result: object) -> None:
        """Keep a result, or forget the one that is kept for None. Without a folder to write to, nothing is kept."""
        results = {key: value for key, value in self.read_all().items() if key != digest}
        if result is not None:
            results[digest] = result
        with suppress(RuntimeError):  # where there is no home
            write_kept(home() / self.name, json.dumps(dict(list(results.items())[-self.most :])))


def keep_kernels() -> None:
    """Let torch.compile and Triton store their kernels in `home`, so that a later start finds them.

    Folders that are set already stay. If `home` is not writable, torch and Triton store them in folders of their own.
    They name each by its code, the versions of torch and Triton, and the GPU.
    """
    folder = home() / "kernels"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if os.access(folder, os.W_OK):
        os.environ.setdefault(KERNELS, str(folder))
    # torch.compile sets this variable when it loads its first Triton kernel from source, which a start with stored
    # kernels may never do: this library's kernels would be stored in one folder and looked for in another.
    if KERNELS in os.environ:
        os.environ.setdefault(TRITON_KERNELS, str(Path(os.environ[KERNELS]) / "triton"))
