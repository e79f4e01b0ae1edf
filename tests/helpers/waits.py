"""What makes the host wait for a GPU, looked for on a CPU."""

from functools import wraps

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Waits"]

READS = {
    *(Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__),
    *(Tensor.nonzero, torch.nonzero, Tensor.cpu, Tensor.numpy),
}


def indices_of(index) -> list[Tensor]:
    return [each for each in (index if isinstance(index, tuple) else [index]) if isinstance(each, Tensor)]


class Waits(TorchFunctionMode):
    """Refuses what waits for a GPU.

    That is to write a number into one element, or where an index tensor says; to read numbers on the host; and to copy
    numbers from ordinary memory.
    """

    def __init__(self):
        super().__init__()
        self._here = True
        self._on_host: list[Tensor] = []

    def elsewhere(self, function):
        """Return a function that may read and copy numbers, since other code takes its place on a GPU."""

        @wraps(function)
        def run(*args):
            before, self._here = self._here, False
            try:
                return function(*args)
            finally:
                self._here = before

        return run

    def on_host(self, function):
        """Return a function that waits for numbers: the tensor that it returns, and views of it, may be read."""

        @wraps(function)
        def run(*args):
            before, self._here = self._here, False
            self._on_host.append(function(*args).clone())
            self._here = before
            return self._on_host[-1]

        return run

    def _is_on_host(self, x: Tensor) -> bool:
        return any(x.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for whole in self._on_host)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is Tensor.__setitem__ and not isinstance(args[2], Tensor):
            tensor, index, _ = args
            assert tensor[index].dim(), "one element"
            assert not indices_of(index)
        if self._here:
            assert func not in READS or self._is_on_host(args[0]), func
            if func is Tensor.__getitem__:
                assert not any(index.dtype == torch.bool for index in indices_of(args[1])), "as many as are marked"
            # `to_device` makes its tensor "cpu" and copies it from pinned memory.
            assert func is not torch.tensor or kwargs.get("device") in (None, "cpu")
        return func(*args, **kwargs)
