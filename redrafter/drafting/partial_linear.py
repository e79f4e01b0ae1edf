"""Products of some of a linear layer's input features alone, where the others are the same for many inputs."""

from torch import Tensor, nn
from torch.nn.functional import linear

from redrafter.target.quantization import Float8Linear

__all__ = ["partial_linear"]


def partial_linear(layer: nn.Linear, x: Tensor, columns: slice, *, with_bias: bool) -> Tensor:
    """Return the product of a layer's weight with some of its input features, `[..., F]`.

    Args:
        layer: The layer, FP8 or not.
        x: Those input features, `[..., d]`.
        columns: Where they are among all of them.
        with_bias: Whether to add the layer's bias.
    """
    weight, bias = layer.weight[:, columns], layer.bias if with_bias else None
    if isinstance(layer, Float8Linear):
        return layer.multiply(x, weight, layer.weight_scale, bias)
    return linear(x, weight, bias)
