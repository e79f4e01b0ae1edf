"""One matrix product where a model asks for several of the same input.

A small product does not fill a GPU's memory bus: the query, key, value, gate and up projections of an 8B model take a
seventh longer one by one than two at a time. No name of a layer is known here: which linear layers read the same tensor
is seen in a forward.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from redrafter.kernels.thin_linear import has_thin_kernel, thin_linear

__all__ = ["FusedLinears", "linear_calls", "same_inputs"]


@contextmanager
def linear_calls(model: nn.Module) -> Iterator[list[tuple[str, Tensor]]]:
    """The names of plain linear layers and their inputs, as they are called within the context."""
    calls: list[tuple[str, Tensor]] = []  # holds the tensors, so that no id is used twice
    linears = {name: module for name, module in model.named_modules() if _is_plain(module)}
    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: calls.append((name, args[0])))
        for name, module in linears.items()
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _is_plain(module: nn.Module) -> bool:
    """Whether a layer's forward is a product with its weight and no more.

    Quantisers keep the layer's class, and replace the forward of the object (compressed-tensors) or the class of its
    weight (torchao).
    """
    return type(module) is nn.Linear and "forward" not in vars(module) and type(module.weight) is nn.Parameter


def same_inputs(calls: Sequence[tuple[str, Tensor]]) -> list[list[str]]:
    """Names of the layers that read one and the same tensor, in the order of their calls; many groups are of one."""
    groups: dict[int, list[str]] = {}
    for name, x in calls:
        groups.setdefault(id(x), []).append(name)
    names = [name for name, _ in calls]
    return [group for group in groups.values() if all(names.count(name) == 1 for name in group)]


class _Joined:
    """What the stand-ins of one group share: the weights in one tensor, and the product while it is being read."""

    def __init__(self, group: Sequence[nn.Linear]):
        self.weight = _join([module.weight for module in group]) if len(group) > 1 else group[0].weight
        biases = [module.bias for module in group if module.bias is not None]
        self.bias = _join(biases) if len(biases) > 1 else biases[0] if biases else None
        self.sizes = [module.out_features for module in group]
        self.thin = self.bias is None and has_thin_kernel(self.weight)
        self.pieces: Any = None


class _StandIn(nn.Module):
    """Has the weight, the bias and the mode of the layer in whose place it stands, at which others may look."""

    def __init__(self, module: nn.Linear, joined: _Joined):
        super().__init__()
        self.weight, self.bias, self.joined = module.weight, module.bias, joined
        self.train(module.training)


class _First(_StandIn):
    def forward(self, x: Tensor) -> Tensor:
        joined = self.joined
        out = thin_linear(x, joined.weight) if joined.thin else linear(x, joined.weight, joined.bias)
        if len(joined.sizes) == 1:
            return out
        joined.pieces = out.split(joined.sizes, dim=-1)
        return joined.pieces[0]


class _Next(_StandIn):
    def __init__(self, module: nn.Linear, joined: _Joined, place: int):
        super().__init__(module, joined)
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        piece = self.joined.pieces[self.place]
        if self.place == len(self.joined.sizes) - 1:
            self.joined.pieces = None
        return piece


class FusedLinears:
    """A context in which a model's groups of linear layers are one product each; outside of it the model is as it was.

    groups: names, a group of one being a layer by itself. The weights of a group move into one tensor of which each
    becomes a view: the same values, shapes and memory. Groups are left alone where a layer has a bias and another none,
    or where dtypes or devices differ.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Sequence[str]]):
        self._places: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []
        for names in groups:
            group: list[Any] = [model.get_submodule(name) for name in names]
            if len({(m.bias is None, m.weight.dtype, m.weight.device, m.in_features) for m in group}) > 1:
                continue
            joined = _Joined(group)
            if len(group) == 1 and not joined.thin:
                continue
            for place, (name, module) in enumerate(zip(names, group, strict=True)):
                parent, _, own = name.rpartition(".")
                stand_in = _Next(module, joined, place) if place else _First(module, joined)
                self._places.append((model.get_submodule(parent), own, module, stand_in))

    def __enter__(self) -> None:
        for parent, name, _, stand_in in self._places:
            parent._modules[name] = stand_in

    def __exit__(self, *_: object) -> None:
        for parent, name, module, _stand_in in self._places:
            parent._modules[name] = module


def _join(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor that holds all, of which they become views."""
    with torch.inference_mode(False), torch.no_grad():  # a tensor made in inference mode could never be trained again
        whole = torch.cat([tensor.detach() for tensor in tensors])
        for tensor, piece in zip(tensors, whole.split([len(tensor) for tensor in tensors]), strict=True):
            tensor.data = piece
    return whole
