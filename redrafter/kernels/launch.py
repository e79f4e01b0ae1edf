"""Launch options that several kernels share: tilings, capabilities of the device, and the conversion of FP8."""

import functools
from typing import NamedTuple

import torch
import triton


class Tiling(NamedTuple):
    """Describes how a product is divided into programs.

    Attributes:
        tokens: Tokens per program.
        features: Output features per program.
        step: Input features that are loaded at once.
        stages: Pipelined loads.
        warps: Warps of a program.
        splits: Parts of the input features, for kernels that split them; None for a number that keeps a large GPU busy.
    """

    tokens: int
    features: int
    step: int
    stages: int
    warps: int
    splits: int | None = None


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA GPU, of the current one without an index; (0, 0) of other devices."""
    if device.type != "cuda" or torch.version.cuda is None:
        return 0, 0
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


def supports_dependent_launch(device: torch.device) -> bool:
    """Return whether a kernel can be launched before the previous one is done, and wait for it on the device.

    This is programmatic dependent launch, which GPUs have from Hopper on.
    """
    return capability(device) >= (9, 0)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have on a GPU."""
    if device.type != "cuda":
        return 227 << 10  # of the interpreter, as on a Hopper GPU
    return int(triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


# Four FP8 numbers in one register become two registers of two numbers, by a few instructions of NVIDIA GPUs: each byte
# is widened with copies of its sign, shifted to the position of exponent and mantissa in the wider format, and cleared
# of the copies between them and the sign. A product with a power of two corrects the bias of its exponent. The GPU's
# own instruction converts two numbers at a quarter of the rate, and only to float16.
_WIDEN = """
{
    .reg .b32 low, high, factor, zero;
    mov.b32 factor, FACTOR;
    mov.b32 zero, 0x80008000;
    prmt.b32 low, $2, $2, 0x9180;
    prmt.b32 high, $2, $2, 0xB3A2;
    shl.b32 low, low, SHIFT;
    shl.b32 high, high, SHIFT;
    and.b32 low, low, MASK;
    and.b32 high, high, MASK;
    fma.rn.KIND $0, low, factor, zero;
    fma.rn.KIND $1, high, factor, zero;
}
"""
_CONSTANTS = {  # KIND, SHIFT, MASK and FACTOR
    (torch.float8_e4m3fn, torch.bfloat16): ("bf16x2", "4", "0x87f087f0", "0x7b807b80"),
    (torch.float8_e4m3fn, torch.float16): ("f16x2", "7", "0xbf80bf80", "0x5c005c00"),
    (torch.float8_e5m2, torch.bfloat16): ("bf16x2", "5", "0x8fe08fe0", "0x77807780"),
    (torch.float8_e5m2, torch.float16): ("f16x2", "8", "0xff00ff00", "0x3c003c00"),
}


@functools.cache
def widening_assembly(narrow: torch.dtype, wide: torch.dtype, device: torch.device) -> str | None:
    """Return assembly that widens four numbers of `narrow`, for `tl.inline_asm_elementwise` with `pack=4`.

    Every FP8 number is exact in bfloat16 and float16, so nothing is rounded. Infinities and NaN, which a cache and a
    weight do not contain, become finite numbers. Returns None for other dtypes, and without an NVIDIA GPU.
    """
    if device.type != "cuda" or torch.version.cuda is None or (narrow, wide) not in _CONSTANTS:
        return None
    names = zip(("KIND", "SHIFT", "MASK", "FACTOR"), _CONSTANTS[narrow, wide], strict=True)
    return functools.reduce(lambda code, name: code.replace(*name), names, _WIDEN)
