"""The folder with this library's measurements and compiled kernels of a machine."""

import os
from contextlib import suppress
from pathlib import Path

HOME = "REDRAFTER_HOME"  # environment variable that names another folder
KERNELS = "TORCHINDUCTOR_CACHE_DIR"  # environment variable by which torch.compile finds its kernels
TRITON_KERNELS = "TRITON_CACHE_DIR"  # environment variable by which Triton finds its kernels


def home() -> Path:
    """Return `$REDRAFTER_HOME`, or `~/.cache/redrafter`."""
    return Path(os.environ.get(HOME) or Path.home() / ".cache" / "redrafter")


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
