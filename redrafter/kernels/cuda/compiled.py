"""Kernels in CUDA C++, compiled once for a GPU by NVRTC, and kept for later starts."""

import ctypes
import functools
from pathlib import Path

import torch

from redrafter.errors import warn
from redrafter.files.home import KeptResults, home, read_kept, write_kept
from redrafter.kernels.cpu.compiled import is_whole, with_digest
from redrafter.kernels.launch import capability, shared_memory, supports_dependent_launch

DRIVER = "libcuda.so.1"
MAX_SHARED_MEMORY, SHARED_MEMORY_SHARE = 8, 9  # attributes of functions, by the numbers of CUDA's headers
INVALID_CONTEXT = 201
DEPENDENT_LAUNCH = 6  # attribute of launches


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("sizes", ctypes.c_uint * 7),  # of the grid, of a program, and of its shared memory
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL(DRIVER)


@functools.cache
def compiler() -> ctypes.CDLL | None:
    """Return NVRTC, which torch's library for its own kernels finds in any installation; None, after a warning."""
    try:
        if torch.version.cuda is None:
            return None  # without a warning, since other GPUs have no such compiler
        try:
            return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"))
        except OSError:
            return ctypes.CDLL(f"libnvrtc.so.{torch.version.cuda.split('.')[0]}")
    except OSError as error:
        warn(f"cannot compile a fast kernel for this GPU: {error}. Weights of 4 and 8 bits are widened")
        return None


def _check(status: int, action: str) -> None:
    if status:
        raise RuntimeError(f"cannot {action}: CUDA's error {status}")


class Kernel:
    """A kernel in the memory of a GPU.

    It is the function with the name of its file, takes one structure, and needs as many bytes of shared memory as 16
    times the size of the variable `shared_blocks`.

    Attributes:
        fits: Whether the GPU has that much. If not, it cannot be launched.
    """

    def __init__(self, source: Path, macros: tuple[tuple[str, int], ...], threads: int, device: int) -> None:
        """Load a kernel that is compiled with `macros`, whose programs have a number of threads."""
        self.threads, self.device = threads, device
        gpu = torch.device("cuda", device)
        major, minor = capability(gpu)
        options = [f"-D{name}={int(value)}" for name, value in macros]
        options += [f"--gpu-architecture=sm_{major}{minor}", "-std=c++17"]
        text = source.read_text(encoding="utf-8")
        decides = [text, options, torch.version.cuda]
        kept = home() / "kernels" / f"{source.stem}-{KeptResults.digest(decides)[:32]}.cubin"
        code = read_kept(kept)
        if not is_whole(code):
            code = with_digest(_compile(text, source.name, options))
            write_kept(kept, code)
        driver, module, self._function = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
        size, at = ctypes.c_size_t(), ctypes.c_void_p()
        with torch.cuda.device(gpu):
            _enter(device)
            _check(driver.cuModuleLoadData(ctypes.byref(module), code), "load a kernel")
            found = driver.cuModuleGetFunction(ctypes.byref(self._function), module, source.stem.encode())
            _check(found, "find a kernel")
            found = driver.cuModuleGetGlobal_v2(ctypes.byref(at), ctypes.byref(size), module, b"shared_blocks")
            _check(found, "find the size of a kernel's shared memory")
            self.shared = 16 * size.value
            self.fits = self.shared <= shared_memory(gpu)
            for attribute, value in ((MAX_SHARED_MEMORY, self.shared), (SHARED_MEMORY_SHARE, 100)) if self.fits else ():
                _check(driver.cuFuncSetAttribute(self._function, attribute, value), "reserve shared memory")
        self._follows = supports_dependent_launch(gpu)

    def launch(self, grid: tuple[int, int], arguments: ctypes.Structure) -> None:
        """Launch the kernel on the current stream, with programmatic dependent launch where GPUs have it."""
        attribute = _Attribute(DEPENDENT_LAUNCH, 0, (ctypes.c_int * 16)(1))
        launch = _Launch(
            (*grid, 1, self.threads, 1, 1, self.shared),
            torch.cuda.current_stream(self.device).cuda_stream,
            ctypes.pointer(attribute),
            self._follows,
        )
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        with torch.cuda.device(self.device):  # another one may be current
            status = _driver().cuLaunchKernelEx(ctypes.byref(launch), self._function, pointers, None)
            if status == INVALID_CONTEXT:
                _enter(self.device)
                status = _driver().cuLaunchKernelEx(ctypes.byref(launch), self._function, pointers, None)
        _check(status, "launch a kernel")


def _enter(device: int) -> None:
    """Make the context that torch uses on a GPU current in this thread, in which nothing may have used it yet."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _check(_driver().cuDeviceGet(ctypes.byref(handle), device), "find a GPU")
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), "find a GPU's context")
    _check(_driver().cuCtxSetCurrent(context), "use a GPU's context")


def _compile(text: str, name: str, options: list[str]) -> bytes:
    nvrtc, program, size = compiler(), ctypes.c_void_p(), ctypes.c_size_t()
    assert nvrtc is not None
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None), "compile")
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
    kind = "ProgramLog" if failed else "CUBIN"
    getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
    result = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{kind}")(program, result)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise RuntimeError(f"cannot compile {name}: {result.value.decode(errors='replace')}")
    return result.raw
