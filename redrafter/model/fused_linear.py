"""Fused linear layers: one matrix product where a model asks for several of the same input.

A small product does not fill a GPU's memory bus: the query, key, value, gate and up projections of an 8B model take a
seventh longer one by one than two at a time. No name of a layer is known here: which linear layers read the same tensor
is seen in a forward.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from redrafter.kernels.linear_operators import has_thin_kernel, thin_linear
from redrafter.model.model_state import has_hooks
from redrafter.model.patch import ModelPatch
from redrafter.model.quantization import Float8Linear


@contextmanager
def linear_calls(model: nn.Module) -> Iterator[list[tuple[str, Tensor, Tensor]]]:
    """Record the calls of plain linear layers inside the context: the name of the layer, its input and its output."""
    calls: list[tuple[str, Tensor, Tensor]] = []  # holds the tensors, so that no id is used twice
    with ModelPatch() as patch:
        for name, module in model.named_modules():
            if is_plain(module):
                patch.hook(module, lambda _, args, output, name=name: calls.append((name, args[0], output)))
        yield calls


def is_plain(module: nn.Module) -> bool:
    """Tell whether a call of a layer is a product with its weight and no more.

    Other quantisers than ours keep the layer's class, and replace the forward of the object (compressed-tensors) or the
    class of its weight (torchao). A hook may change what a layer is given, and what it returns.
    """
    return (
        type(module) in (nn.Linear, Float8Linear)
        and "forward" not in vars(module)
        and type(module.weight) is nn.Parameter
        and not has_hooks(module)
    )


def same_inputs(calls: Sequence[tuple[str, Tensor, Tensor]]) -> list[list[str]]:
    """Group the names of linear layers by the tensor that they read, in the order of what `linear_calls` records.

    A layer that is called twice is in no group; many groups are of one layer.
    """
    groups: dict[int, list[str]] = {}
    for name, x, _ in calls:
        groups.setdefault(id(x), []).append(name)
    names = [name for name, _, _ in calls]
    return [group for group in groups.values() if all(names.count(name) == 1 for name in group)]


class _FusedGroup:
    """What the stand-ins of one group share: the weights in one tensor, and the product while it is being read."""

    def __init__(self, layers: Sequence[Any], thin: bool):
        self.weight = _fuse([module.weight for module in layers]) if len(layers) > 1 else layers[0].weight
        biases = [module.bias for module in layers if module.bias is not None]
        self.bias = _fuse(biases) if len(biases) > 1 else biases[0] if biases else None
        self.scale = _fuse([m.weight_scale for m in layers]) if isinstance(layers[0], Float8Linear) else None
        self.float8 = None if self.scale is None else layers[0]
        self.sizes = [module.out_features for module in layers]
        self.thin = thin and self.bias is None and has_thin_kernel(self.weight)
        self.outputs: Any = None  # of all layers, until the last one has read its own

    def multiply(self, x: Tensor) -> Tensor:
        """Return the product of all layers."""
        if self.float8 is not None:
            return self.float8.multiply(x, self.weight, self.scale, self.bias)
        return thin_linear(x, self.weight) if self.thin else linear(x, self.weight, self.bias)


class _FirstStandIn(nn.Module):
    """A stand-in for the first layer of a group, which computes the product of all.

    It has the layer's weight, bias and mode, at which the model's code may look.
    """

    def __init__(self, module: nn.Linear, group: _FusedGroup, index: int):
        super().__init__()
        self.weight, self.bias, self.group, self.index = module.weight, module.bias, group, index
        self.train(module.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, and leave those of the others to their stand-ins."""
        group = self.group
        out = group.multiply(x)
        if len(group.sizes) == 1:
            return out
        group.outputs = out.split(group.sizes, dim=-1)
        return group.outputs[0]


class _NextStandIn(_FirstStandIn):
    """A stand-in for a later layer of a group, which reads its part of the product."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        output = self.group.outputs[self.index]
        if self.index == len(self.group.sizes) - 1:
            self.group.outputs = None
        return output


class FusedLinears:
    """The groups of linear layers of a model that are one product each, in the forwards that they are applied to.

    The weights of a group move into one tensor of which each becomes a view: the same values, shapes and memory. Groups
    are left alone where a layer has a bias and another none, or where dtypes or devices differ.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Sequence[str]], *, thin: bool = True):
        """Fuse the weights of groups of a model's layers, by their names; `thin` allows the kernel for few tokens."""
        self._stand_ins: list[tuple[nn.Module, str, nn.Module]] = []  # parent, name there, stand-in
        for names in groups:
            layers: list[Any] = [model.get_submodule(name) for name in names]
            if len({(m.bias is None, m.weight.dtype, m.weight.device, m.in_features) for m in layers}) > 1:
                continue
            group = _FusedGroup(layers, thin)
            if len(layers) == 1 and not group.thin:
                continue
            for index, (name, module) in enumerate(zip(names, layers, strict=True)):
                parent, _, attribute = name.rpartition(".")
                stand_in = (_NextStandIn if index else _FirstStandIn)(module, group, index)
                self._stand_ins.append((model.get_submodule(parent), attribute, stand_in))

    def apply(self, patch: ModelPatch) -> None:
        """Have stand-ins in the places of the layers."""
        for parent, name, stand_in in self._stand_ins:
            patch.put(parent._modules, name, stand_in)


def _fuse(tensors: Sequence[Tensor]) -> Tensor:
    """Return one tensor that holds all of these, which become views of it."""
    first, rows = tensors[0], sum(map(len, tensors))
    addresses = accumulate((tensor.nbytes for tensor in tensors), initial=first.data_ptr())
    with torch.inference_mode(False), torch.no_grad():  # a tensor made in inference mode could never be trained again
        if all(
            tensor.is_contiguous() and (tensor.data_ptr(), tensor.untyped_storage().data_ptr()) == (address, stored)
            for tensor, address in zip(tensors, addresses, strict=False)
            for stored in [first.untyped_storage().data_ptr()]
        ):  # another engine, or an earlier call, has fused them
            return first.detach().as_strided((rows, *first.shape[1:]), first.stride())
        whole = torch.cat([tensor.detach() for tensor in tensors])
        for tensor, part in zip(tensors, whole.split([len(tensor) for tensor in tensors]), strict=True):
            tensor.data = part
    return whole
