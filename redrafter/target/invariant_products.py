"""Forwards in which a row's result does not depend on the other rows: what takes the place of what, and what is left.

A forward is a sequence of functions of rows, but not in the bits of its numbers: a matrix product sums in an order that
suits the number of rows, and on a CPU a function of single numbers is computed by other instructions at the end of a
tensor than before it. `RowByRow` is the context in which both come from the row alone.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as fx_config
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from redrafter.kernels.elementwise import in_full_vectors
from redrafter.kernels.invariant_linear import invariant_linear
from redrafter.target.invariant_experts import EXPERTS_NAME, expert_configs
from redrafter.target.patch import ModelPatch

__all__ = ["RowByRow", "record_products"]

# Names of torch's own operators that multiply matrices. Ours have another namespace.
PRODUCT = re.compile(
    r"aten::(_?(add|bad)?d?b?mm|_?addmm\w*|addmv|mv|dot|vdot|addr|linear|matmul|einsum|bilinear|_\w+_mm\w*|\w*convolution\w*|"
    r"conv\w+|\w*scaled_dot_product\w*|\w*(gru|lstm|rnn)\w*)$"
)


class RowByRow:
    """What a forward is patched with in which a model computes each row as it would alone, attention apart.

    Linear layers, and all that calls `torch.nn.functional.linear`, use `invariant_linear`, and experts use
    `experts_row_by_row`.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        """Find what is replaced.

        Args:
            model: The model.
            device: Where it is.
        """
        self._configs = expert_configs(model)
        self._on_cpu = device.type == "cpu"

    def apply(self, patch: ModelPatch) -> None:
        """Have one forward compute row by row."""
        for config in self._configs:
            patch.set(config, "_experts_implementation", EXPERTS_NAME)
        patch.enter(_InvariantLinears())
        # On a GPU two sizes that happen to be equal when the forward is compiled stay two, and all share a variant.
        patch.enter(_FullVectors() if self._on_cpu else fx_config.patch(use_duck_shape=False))  # type: ignore[attr-defined]


class _InvariantLinears(TorchFunctionMode):
    """Replaces the product of every linear layer."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is linear:
            return _linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return invariant_linear(input, weight, bias)


class _FullVectors(TorchDispatchMode):
    """Computes functions of single numbers by the same instructions for every number of a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.pointwise not in func.tags or not _takes_one_tensor(args, kwargs):
            return func(*args, **kwargs)
        x, *rest = args
        result = in_full_vectors(lambda chunk: func(chunk, *rest, **kwargs), x)
        return x.copy_(result) if func._schema.is_mutable else result


def _takes_one_tensor(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Tell whether a tensor of floating-point numbers is the first argument and no other one is a tensor."""
    if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point() or not args[0].numel():
        return False
    return not any(isinstance(x, Tensor) for x in (*args[1:], *kwargs.values()))


@contextmanager
def record_products(model: nn.Module) -> Iterator[list[tuple[str, str]]]:
    """Record torch's own products of matrices inside the context: the name of the module, and of the operator.

    Products over one number are left out: such a sum has no order. So is what runs outside of the model, as a drafter's
    layer does, which changes no text.

    Args:
        model: The model whose modules are named.
    """
    calls: list[str] = []
    found: list[tuple[str, str]] = []
    with ModelPatch() as patch:
        for name, module in model.named_modules():
            patch.hook(module, lambda *_, name=name: calls.append(name), before=True)
            patch.hook(module, lambda *_: calls.__delitem__(-1))
        patch.enter(_Recorder(calls, found))
        yield found


class _Recorder(TorchDispatchMode):
    """Writes down which module is running whenever torch multiplies matrices."""

    def __init__(self, calls: Sequence[str], found: list[tuple[str, str]]):
        super().__init__()
        self._calls, self._found = calls, found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if self._calls and PRODUCT.fullmatch(name) and not _sums_one_number(name, args):
            self._found.append((self._calls[-1], name.removeprefix("aten::")))
        return func(*args, **(kwargs or {}))


def _sums_one_number(name: str, args: Sequence[Any]) -> bool:
    """Tell whether each number of a product is one number times another, as where positions meet frequencies."""
    return name in ("aten::mm", "aten::bmm", "aten::matmul") and args[0].dim() > 1 and args[0].shape[-1] == 1
