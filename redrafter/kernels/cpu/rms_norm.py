"""RMS norms on a CPU, each one call of a kernel in C instead of eight of torch's operators."""

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from redrafter.kernels.cpu.grouped_product import load

_ARGUMENTS = [ctypes.c_void_p] * 3 + [ctypes.c_size_t] * 2 + [ctypes.c_float] * 2


@functools.cache
def find_kernel() -> Callable[..., None] | None:
    """Return the kernel; None where there is none."""
    library = load()
    if library is None:
        return None
    library.rms_norm.argtypes, library.rms_norm.restype = _ARGUMENTS, None
    return library.rms_norm


def fast_forward(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return a function that computes an RMS norm of transformers faster in float32; None for another module.

    What the module multiplies with, its weight or one more, is found by trying it.
    """
    weight, kernel = getattr(module, "weight", None), find_kernel()
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if kernel is None or not isinstance(epsilon, float) or not isinstance(weight, Tensor) or weight.dim() != 1:
        return None
    if weight.dtype != torch.float32 or not weight.is_cpu or not type(module).__name__.endswith("RMSNorm"):
        return None
    slow: Callable[[Tensor], Tensor] = module.forward

    def normalize(x: Tensor, offset: float) -> Tensor:
        weight = module.weight
        if x.dtype is not torch.float32 or not x.is_cpu or x.requires_grad or weight.dtype is not torch.float32:
            return slow(x)
        x, width = x.contiguous(), weight.shape[0]
        out = torch.empty_like(x)
        kernel(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, epsilon, offset)
        return out

    x = torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for offset in (0.0, 1.0):
            fast = functools.partial(normalize, offset=offset)
            try:
                same = torch.allclose(slow(x), fast(x), rtol=1e-5, atol=1e-6)
            except (TypeError, RuntimeError):  # takes other arguments
                return None
            if same:
                return fast
    return None
