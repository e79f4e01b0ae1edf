"""Low-rank updates of a drafter's linear layers (LoRA, Hu et al. 2021, arXiv 2106.09685), for further training.

The weight W `[F, D]` of a layer is frozen, and the layer computes W + B A, with A `[r, D]` and B `[F, r]`. So only thin
factors have gradients and optimizer states. The sum is a weight like W: the saved drafter has an unchanged form, and a
running server can load it in place of the current one.
"""

import math
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class LowRankLinear(nn.Linear):
    """A linear layer whose weight and bias are frozen, with a trained low-rank update.

    Attributes:
        lora_A: The input factor, `[r, D]`, random at first.
        lora_B: The output factor, `[F, r]`, zero at first, so that the layer is unchanged at the start.
    """

    def __init__(self, layer: nn.Linear, rank: int):
        """Take over the weight and the bias of a layer, and add factors of a rank."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_A = nn.Parameter(layer.weight.new_empty(rank, layer.in_features))
        self.lora_B = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))  # as PEFT does
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to `[..., D]`."""
        return linear(x, self.weight, self.bias) + self.update(x, slice(None))

    def update(self, x: Tensor, columns: slice) -> Tensor:
        """Return the factors' term for some of the input features, `[..., d]`."""
        return linear(linear(x, self.lora_A[:, columns]), self.lora_B)


class LowRankDrafter:
    """A copy of a drafter that is frozen except for low-rank updates of its linear layers.

    Products over the vocabulary have no updates: factors with a row for each id would be larger than all others, and
    their inputs are updated.

    Attributes:
        whole: The drafter, unchanged until `merge`.
        drafter: The copy.
    """

    def __init__(self, whole: Any, rank: int, seed: int = 0):
        """Copy a drafter, and add updates of a rank, initialised from a seed."""
        self.whole, self.drafter = whole, deepcopy(whole).requires_grad_(False)
        heads = {id(weight) for weight in self.drafter.head_weights()}
        self._layers: dict[str, LowRankLinear] = {}
        # The program's random state stays unchanged, or training with these layers would see other data than without.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for name, module in list(self.drafter.named_modules()):
                if type(module) is nn.Linear and id(module.weight) not in heads:
                    self._layers[name] = LowRankLinear(module, rank)
                    self.drafter.set_submodule(name, self._layers[name])

    @property
    def trained_parameters(self) -> int:
        """Number of the numbers that are trained."""
        return sum(layer.lora_A.numel() + layer.lora_B.numel() for layer in self._layers.values())

    @torch.no_grad()
    def merge(self) -> None:
        """Write the weights with their updates to the whole drafter."""
        for name, layer in self._layers.items():
            self.whole.get_parameter(f"{name}.weight").copy_(layer.weight + layer.lora_B @ layer.lora_A)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return the frozen weights and the factors by layer: a sum alone could not be separated again."""
        return {name: layer.state_dict() for name, layer in self._layers.items()}

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Restore what `state_dict` returned; `KeyError` or `RuntimeError` for that of another drafter or rank."""
        for name, layer in self._layers.items():
            layer.load_state_dict(state[name])
