"""Runs kernels in CUDA C++ on a CPU, compiled by its own compiler with `emulated_gpu.h`."""

import ctypes
import subprocess
import tempfile
from pathlib import Path

EMULATION = Path(__file__).with_suffix(".h")
ENTRY = """
static Arguments arguments;
static void entry() { NAME(arguments); current->done = true; }
extern "C" void run(const Arguments* given, int columns, int rows) {
    arguments = *given;
    run_grid(columns, rows, THREADS / 32, SHARED_BYTES, entry);
}
"""


class EmulatedKernel:
    """Has the interface of `redrafter.kernels.cuda.compiled.Kernel`."""

    fits = True

    def __init__(self, source: Path, macros: tuple[tuple[str, int], ...], threads: int, device: int | None) -> None:
        code = [f"#define {name} {int(value)}" for name, value in macros]
        code += [f'#include "{EMULATION}"', f'#include "{source}"', ENTRY.replace("NAME", source.stem)]
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "kernel.so"
            command = ["g++", "-O1", "-w", "-std=c++17", "-fPIC", "-shared", "-x", "c++", "-", "-o", str(library)]
            subprocess.run(command, input="\n".join(code).encode(), check=True)
            self.library = ctypes.CDLL(str(library))

    def launch(self, grid: tuple[int, int], arguments: ctypes.Structure) -> None:
        self.library.run(ctypes.byref(arguments), *grid)
