"""Compute in float32 with a half-precision model, without a copy of it."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

__all__ = ["in_float32"]

_HALF = (torch.float16, torch.bfloat16)
_NOT_WIDENED = frozenset({"__get__", "__set__", "__setitem__"})  # functions that mean the tensor itself


class _Float32(TorchFunctionMode):
    """Widen every half-precision argument of every torch function; a weight exists in float32 only while it is used."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _NOT_WIDENED or (name.endswith("_") and not name.endswith("__")):  # in place
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            args, kwargs = tree_map(_widened, (args, kwargs or {}))
        return func(*args, **kwargs)


def _widened(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.dtype in _HALF else x


def in_float32() -> TorchFunctionMode:
    """Return a context in which torch computes in float32, whatever dtype the weights have."""
    return _Float32()
