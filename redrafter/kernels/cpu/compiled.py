"""Functions in C, compiled once by this machine's compiler for its own CPU, and kept for later starts."""

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from redrafter.errors import warn
from redrafter.files.home import KeptResults, home, read_kept, write_kept

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-march=native", "-fPIC", "-shared")
MAX_SECONDS = 300  # of a compilation, which takes two


@functools.cache
def load_library(source: Path) -> ctypes.CDLL | None:
    """Return the library of a file in C; None, after a warning, where it cannot be compiled or loaded.

    It has a function with the file's name.
    """
    try:
        compiler = shlex.split(os.environ.get("CC") or next(filter(shutil.which, COMPILERS), ""))
        if not compiler:
            raise FileNotFoundError(f"there is none of {', '.join(COMPILERS)}")
        files = sorted(source.parent.glob("*.c"))  # as it may include others
        decides = [[file.read_text(encoding="utf-8") for file in files], compiler, FLAGS, _cpu()]
        kept = home() / "kernels" / f"{source.stem}-{KeptResults.digest(decides)[:32]}.so"
        if is_whole(read_kept(kept)):
            with suppress(OSError):  # of another machine
                return _open(kept, source)
        return _compile(compiler, source, kept)
    except (OSError, ValueError, RuntimeError, subprocess.SubprocessError) as error:
        printed = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
        warn(
            f"cannot compile a fast kernel for this CPU: {printed.splitlines()[0] if printed else error}. Weights of 4 "
            "and 8 bits are widened, and drafters' heads not rounded; install gcc or clang, or name a compiler in the "
            "environment variable CC"
        )
        return None


def _compile(compiler: list[str], source: Path, kept: Path) -> ctypes.CDLL:
    """Compile a file, load the library, and copy it to `kept` if that can be written."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / kept.name
        command = [*compiler, *FLAGS, "-o", str(made), str(source)]
        subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=MAX_SECONDS)
        library, code = _open(made, source), made.read_bytes()  # stays loaded without its file
        write_kept(kept, with_digest(code))
        return library


def _open(path: Path, source: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    if not hasattr(library, source.stem):
        raise OSError(f"the compiler made a library without {source.stem}")
    return library


def with_digest(library: bytes) -> bytes:
    """Return a library that `is_whole`; what follows its sections is not read."""
    return library + hashlib.sha256(library).digest()


def is_whole(library: bytes) -> bool:
    """Return whether a library ends with its digest, without which a damaged one would end the process."""
    return hashlib.sha256(library[:-32]).digest() == library[-32:]


def _cpu() -> list[str]:
    """Return what identifies the CPU and its instructions, by which `-march=native` chooses."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
        return [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return []
