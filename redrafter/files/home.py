"""The folder with this library's measurements and compiled kernels of a machine."""

import os
from contextlib import suppress
from pathlib import Path

HOME = "REDRAFTER_HOME"  # environment variable that names another folder
KERNELS = "TORCHINDUCTOR_CACHE_DIR"  # environment variable by which torch.compile finds its kernels


def home() -> Path:
    """Return `$REDRAFTER_HOME`, or `~/.cache/redrafter`."""
    return Path(os.environ.get(HOME) or Path.home() / ".cache" / "redrafter")


def keep_kernels() -> None:
    """Let torch.compile store its kernels in `home`, so that a later start finds them, unless a folder is already set.

    Otherwise, or if `home` is not writable, torch stores them in a folder for temporary files. It names each by its
    code, the versions of torch and Triton, and the GPU.
    """
    folder = home() / "kernels"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if os.access(folder, os.W_OK):
        os.environ.setdefault(KERNELS, str(folder))
