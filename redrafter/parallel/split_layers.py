"""Layers of which each rank computes a part. What they return is the same on every rank, bit for bit."""

from torch import Tensor, nn
from torch.nn.functional import pad

from redrafter.parallel.ranks import Ranks

__all__ = ["GatheredLinear", "SummedLinear"]


class SummedLinear(nn.Module):
    """A linear layer whose input features are split: the outputs of all ranks are added.

    Attributes:
        ranks: The ranks.
        part: This rank's layer, without bias: features `[..., I_r]` to `[..., O]`.
        bias: Added once, after the sum, `[O]`; None for none.
        splits: Whether the input has the features of all ranks, `[..., I]`, of which this one takes its own.
    """

    def __init__(self, layer: nn.Linear, weight: nn.Parameter, bias: nn.Parameter | None, ranks: Ranks, splits: bool):
        """Make the layer of this rank.

        Args:
            layer: The whole layer, for its sizes and mode.
            weight: This rank's columns of the weight, `[O, I_r]`.
            bias: The whole bias, `[O]`; None for none.
            ranks: The ranks.
            splits: Whether the input has the features of all ranks.
        """
        super().__init__()
        self.ranks, self.splits, self.bias = ranks, splits, bias
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.part = part_of(weight, None)
        self.first = -(-layer.in_features // ranks.size) * ranks.rank  # of this rank's features
        self.train(layer.training)

    @property
    def weight(self) -> Tensor:
        """This rank's part of the weight, whose dtype and device models look at."""
        return self.part.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the whole layer, `[..., O]`."""
        if self.splits:
            x = x.narrow(-1, self.first, self.part.in_features)
        out = self.ranks.sum(self.part(x))
        return out if self.bias is None else out + self.bias


class GatheredLinear(nn.Module):
    """A linear layer whose output features are split: the outputs of all ranks are put side by side.

    Attributes:
        ranks: The ranks.
        part: This rank's layer: features `[..., I]` to `[..., O_r]`.
    """

    def __init__(self, layer: nn.Linear, weight: nn.Parameter, bias: nn.Parameter | None, ranks: Ranks):
        """Make the layer of this rank.

        Args:
            layer: The whole layer, for its sizes and mode.
            weight: This rank's rows of the weight, `[O_r, I]`.
            bias: This rank's part of the bias, `[O_r]`; None for none.
            ranks: The ranks.
        """
        super().__init__()
        self.ranks, self.in_features, self.out_features = ranks, layer.in_features, layer.out_features
        self.part = part_of(weight, bias)
        self.padding = -(-layer.out_features // ranks.size) - len(weight)  # the last rank may have fewer rows
        self.train(layer.training)

    @property
    def weight(self) -> Tensor:
        """This rank's part of the weight, whose dtype and device models look at."""
        return self.part.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the whole layer, `[..., O]`."""
        return self.ranks.join_last(pad(self.part(x), (0, self.padding)))[..., : self.out_features]


def part_of(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    """Return a plain linear layer of a weight `[O, I]` and a bias `[O]`."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = weight
    layer.register_parameter("bias", bias)
    return layer
