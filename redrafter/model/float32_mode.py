"""Run a half-precision model in float32 for a while, without a permanent copy of its weights."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from redrafter.model.patch import count_writes

HALF = (torch.float16, torch.bfloat16)
MAX_HELD_BYTES = 2 << 30  # memory of weights in float32 on a CPU
# Functions that refer to the tensor object itself, or to its memory: kernels for CPUs read numbers as they are stored.
_NOT_WIDENED = frozenset({"__get__", "__set__", "__setitem__", "data_ptr"})

_EMBEDDING: Any = functional.embedding


class InFloat32(TorchFunctionMode):
    """Converts every half-precision argument of torch's functions to float32, so weights need no permanent copy.

    Copies of weights in the host's memory are kept until the mode ends, `MAX_HELD_BYTES` of them: of a model of 0.5B on
    a CPU, making them again in each of 18 forwards took half of the time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, tuple[Tensor, Tensor, int]] = {}  # by id: a weight, its copy, and its count of writes
        self._free_bytes = MAX_HELD_BYTES

    def __torch_function__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        name = getattr(func, "__name__", "")
        if name in _NOT_WIDENED or (name.endswith("_") and not name.endswith("__")):  # in-place functions
            return func(*args, **(kwargs or {}))
        # Without the mode, or the conversion would call this function again.
        with torch._C.DisableTorchFunction():
            if func is _EMBEDDING:  # only the rows that are read, of what may be half of a small model
                return self._widened(func(*args, **(kwargs or {})))
            wide = [self._widened(x) for x in args]
            named = {key: self._widened(x) for key, x in (kwargs or {}).items()}
        return func(*wide, **named)

    def _widened(self, x: object) -> object:
        if isinstance(x, Tensor):
            if x.dtype not in HALF:
                return x
            return self._widened_weight(x) if isinstance(x, Parameter) and x.device.type == "cpu" else x.float()
        # Only for what may hold tensors: it takes longer than most functions that the mode is called for.
        return tree_map(self._widened, x) if type(x) in (tuple, list, dict) else x

    def _widened_weight(self, weight: Tensor) -> Tensor:
        _, wide, version = self._held.get(id(weight), (None, None, None))
        if wide is None or count_writes(wide) != version:  # code that converts a weight may write to the result
            wide = weight.float()
            if wide.nbytes <= self._free_bytes:
                self._free_bytes -= wide.nbytes
                self._held[id(weight)] = weight, wide, count_writes(wide)
        return wide
