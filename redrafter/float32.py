"""Compute a half-precision model in float32 without a copy of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

__all__ = ["in_float32"]

_HALF = (torch.float16, torch.bfloat16)


class _Float32(TorchFunctionMode):
    """Widen every half-precision argument of every torch function; a weight exists in float32 only while it is used."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS or (name.endswith("_") and not name.endswith("__")):  # in place: the tensor itself is meant
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            args, kwargs = tree_map(_widened, (args, kwargs or {}))
        return func(*args, **kwargs)


_READS = frozenset({"__get__", "__set__", "__setitem__"})


def _widened(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.dtype in _HALF else x


@contextmanager
def in_float32() -> Iterator[None]:
    """Run what is inside in float32, products included, whatever dtype the weights have."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with _Float32():
            yield
    finally:
        torch.set_float32_matmul_precision(before)
