"""LoRA beside a model's layers: a low-rank product for each token of a forward, with the weights of its own adapter.

The weights of all adapters of a layer stand in two matrices, one slot behind the other. A forward multiplies its tokens
by the first matrix, keeps for each token the columns of its own slot, and multiplies by the second one. So all shapes
are fixed, tokens of any adapters share a forward, and a captured step sees an adapter that is loaded later.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from redrafter.errors import MismatchError, UnsupportedError
from redrafter.target.patch import ModelPatch, Running

__all__ = ["LoraStacks", "LoraWeights", "check_layers", "merge_into"]


@dataclass(frozen=True)
class LoraWeights:
    """The weights of one LoRA adapter.

    Attributes:
        source: Where they come from, for messages.
        layers: By name of a layer, its A `[r, in]` and its B `[out, r]` with the adapter's scaling in it, float32.
    """

    source: str
    layers: Mapping[str, tuple[Tensor, Tensor]]

    @property
    def rank(self) -> int:
        """The largest rank of its layers."""
        return max(len(a) for a, _ in self.layers.values())


def check_layers(model: nn.Module, weights: LoraWeights) -> None:
    """Check that a model has the layers of an adapter, as linear layers of its widths.

    Raises:
        MismatchError: It lacks one, or has it in another size.
        UnsupportedError: One is no linear layer, or is the model's head.
    """
    for name, (a, b) in weights.layers.items():
        try:
            layer: Any = model.get_submodule(name)
        except AttributeError:
            raise MismatchError(
                f"{weights.source} was made for another model: {type(model).__name__} has no layer {name}"
            ) from None
        if layer is model.get_output_embeddings():  # type: ignore[operator]
            raise UnsupportedError(_refusal(weights, f"it changes {name}, the model's head"))
        if not isinstance(layer, nn.Linear | Conv1D):
            raise UnsupportedError(_refusal(weights, f"{name} is no linear layer but a {type(layer).__name__}"))
        widths = (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else (layer.nx, layer.nf)
        if (a.shape[1], len(b)) != widths:
            raise MismatchError(
                f"{weights.source} was made for another model: its {name} reads {a.shape[1]} numbers and writes "
                f"{len(b)}, that of {type(model).__name__} reads {widths[0]} and writes {widths[1]}"
            )


def merge_into(model: nn.Module, weights: LoraWeights) -> None:
    """Add an adapter to the weights of a model, in place and for good.

    Raises:
        MismatchError: The model lacks a layer of the adapter, or has it in another size.
        UnsupportedError: A layer is none that can be added to, such as one of a quantised model.
    """
    check_layers(model, weights)
    for name in weights.layers:
        weight = model.get_submodule(name).weight
        if not (isinstance(weight, Tensor) and weight.is_floating_point() and weight.element_size() > 1):
            raise UnsupportedError(
                f"{weights.source} cannot be merged into {name}, which is quantised: give the model as it was before"
            )
    with torch.inference_mode(False), torch.no_grad():
        for name, (a, b) in weights.layers.items():
            layer: Any = model.get_submodule(name)
            change = (b @ a).T if isinstance(layer, Conv1D) else b @ a
            layer.weight.data += change.to(layer.weight)


def _refusal(weights: LoraWeights, reason: str) -> str:
    return (
        f"{weights.source} cannot be applied beside others: {reason}; merge it into its model with PEFT's "
        "merge_and_unload(), and serve what that saves"
    )


class _Adapted(nn.Module):
    """A stand-in for a layer, with its weight and bias, that adds the product of each token's own adapter."""

    def __init__(self, layer: Any, a: Tensor, b: Tensor, running: Running):
        super().__init__()
        self.layer, self.weight, self.bias = layer, layer.weight, layer.bias
        self.running, self.a, self.b = running, a, b
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output with the adapter's; the layer's alone in other threads' forwards."""
        running, output = self.running, self.layer(x)
        if running.elsewhere():
            return output
        inner = linear(x.to(self.a.dtype), self.a)  # [..., S * R]
        keep = running.value.to(inner.device).view(inner.shape)
        return output + linear(torch.where(keep, inner, 0.0), self.b).to(output.dtype)


class LoraStacks:
    """The weights of S adapters of rank R at most, for the layers that any of them changes.

    Attributes:
        version: Number of times that layers were added: a captured or compiled forward knows those of its time.
    """

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype, slots: int, rank: int):
        """Make stacks without layers.

        Args:
            model: The model.
            device: Where forwards say which adapter each token has.
            dtype: Dtype of the model's hidden states.
            slots: S.
            rank: R.
        """
        self._model, self._dtype = model, dtype
        self.slots, self.rank, self.version = slots, rank, 0
        self._weights: dict[str, tuple[Tensor, Tensor]] = {}  # by layer: A `[S * R, in]` and B `[out, S * R]`
        self._columns = torch.arange(1, slots + 1, device=device).repeat_interleave(rank)  # slot of each column
        self._stand_ins: dict[str, _Adapted] = {}
        self._running = Running()  # tells which columns each token keeps, as `keep` returns it

    def write(self, slot: int, weights: LoraWeights, layers: Sequence[str]) -> None:
        """Write an adapter into a slot, which no token has now.

        Args:
            slot: The slot, from 1.
            weights: The adapter.
            layers: Names of its layers that take part in a forward.
        """
        columns = slice((slot - 1) * self.rank, slot * self.rank)
        with torch.inference_mode(False), torch.no_grad():
            new = [name for name in layers if name not in self._weights]
            for name in new:
                self._weights[name] = self._new_stacks(name)
            self.version += bool(new)
            for name, (stacked_a, stacked_b) in self._weights.items():
                stacked_a[columns], stacked_b[:, columns] = 0, 0
                if name in layers:
                    a, b = weights.layers[name]
                    stacked_a[columns][: len(a)] = a.to(stacked_a)
                    stacked_b[:, columns][:, : len(a)] = b.to(stacked_b)

    def _new_stacks(self, name: str) -> tuple[Tensor, Tensor]:
        layer: Any = self._model.get_submodule(name)
        device, width = layer.weight.device, self.slots * self.rank
        if device.type == "meta":
            raise UnsupportedError(
                f"adapters cannot be applied where {name} is moved to its device layer by layer: load the model whole, "
                "or merge the adapter into it with PEFT's merge_and_unload()"
            )
        inputs, outputs = (
            (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else (layer.nx, layer.nf)
        )
        with device:
            return torch.zeros(width, inputs, dtype=self._dtype), torch.zeros(outputs, width, dtype=self._dtype)

    def keep(self, adapters: Tensor) -> Tensor:
        """Return which columns each token keeps, `[..., S * R]` bool.

        Args:
            adapters: Slot of each token, 0 for none, `[...]` int64.
        """
        return adapters[..., None] == self._columns

    def set_keep(self, keep: Tensor) -> None:
        """Set what the tokens of the running forward keep, as `keep` returns it."""
        self._running.value = keep

    def apply(self, patch: ModelPatch, keep: Tensor) -> None:
        """Have stand-ins in the places of the layers, which apply the adapters.

        Args:
            patch: The patch of the forward; stand-ins for fused layers are there already.
            keep: What each token keeps, as `keep` returns it.
        """
        patch.tell(self._running, keep)
        for name in self._weights:
            parent_name, _, attribute = name.rpartition(".")
            parent = self._model.get_submodule(parent_name)
            patch.put(parent._modules, attribute, self._stand_in(name, parent._modules[attribute]))

    def _stand_in(self, name: str, layer: Any) -> _Adapted:
        """Return the stand-in for a layer, the same object for the same layer, or a compiler would see a new one."""
        known = self._stand_ins.get(name)
        if known is None or known.layer is not layer:
            known = self._stand_ins[name] = _Adapted(layer, *self._weights[name], self._running)
        return known
