"""Linear layers with weights of FP8 (e4m3): half the bytes of bfloat16, where reading weights takes most of the time.

What a layer writes keeps its dtype. What it reads does so too, or is rounded to FP8 with a scale for each token. Either
way a token is computed as it would be without the tokens beside it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from redrafter.kernels.float8_linear import float8_linear, rounded_float8_linear

__all__ = ["Float8Linear", "float8_scheme", "quantize_linears"]

LARGEST = torch.finfo(torch.float8_e4m3fn).max


class Float8Linear(nn.Linear):
    """A linear layer whose weight is FP8, with a scale for each output feature.

    Attributes:
        weight: The weight divided by its scales, `[F, D]` float8_e4m3fn.
        weight_scale: What each row of it is multiplied by, `[F]` float32.
        rounds_inputs: Whether inputs are rounded to FP8 too, each token by itself.
    """

    weight_scale: Tensor

    def __init__(self, layer: nn.Linear, device: torch.device | str | None = None, *, rounds_inputs: bool = False):
        """Quantise a layer.

        Args:
            layer: The layer; its bias is shared.
            device: Where to quantise its weight, which stays there; None for where it is.
            rounds_inputs: Whether to round its inputs.
        """
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight, scale = _quantize(layer.weight.detach().to(device))
        self.weight, self.bias = nn.Parameter(weight, requires_grad=False), layer.bias
        self.register_buffer("weight_scale", scale)
        self.rounds_inputs = rounds_inputs
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to `[..., D]`."""
        return self.multiply(x, self.weight, self.weight_scale, self.bias)

    def multiply(self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product with a weight that holds this one or is part of it; inputs are rounded as here."""
        product: Tensor = (rounded_float8_linear if self.rounds_inputs else float8_linear)(x, weight, scale, bias)
        return product

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Apply a function that moves or casts tensors: a cast changes the bias alone."""

        def without_cast(tensor: Tensor) -> Tensor:
            return fn(tensor) if tensor is self.bias else fn(tensor.view(torch.uint8)).view(tensor.dtype)

        return super()._apply(without_cast, recurse)


def quantize_linears(
    model: nn.Module,
    *,
    keep: tuple[nn.Module | None, ...] = (),
    device: torch.device | str | None = None,
    rounds_inputs: bool = False,
) -> int:
    """Replace the linear layers of a model by FP8 ones, in place and for good.

    Args:
        model: The model.
        keep: Modules that stay as they are, with all that is in them.
        device: Where each weight is moved before it is quantised; None for where it is.
        rounds_inputs: Whether their inputs are rounded to FP8 too.

    Returns:
        How many weights were quantised.
    """
    kept = {id(module) for root in keep if root is not None for module in root.modules()}
    replaced: dict[int, Float8Linear] = {}
    with torch.inference_mode(False), torch.no_grad():
        for parent in list(model.modules()):
            for name, child in parent._modules.items():
                if type(child) is nn.Linear and id(child) not in kept:
                    if id(child) not in replaced:
                        replaced[id(child)] = Float8Linear(child, device, rounds_inputs=rounds_inputs)
                    parent._modules[name] = replaced[id(child)]
    return sum(layer.weight.numel() for layer in replaced.values())


def float8_scheme(model: nn.Module) -> str | None:
    """Return how the linear layers of a model were quantised.

    Returns:
        "fp8" where weights alone are FP8, "fp8_dynamic" where inputs are rounded too, None where no layer is quantised.
    """
    layers = [module for module in model.modules() if isinstance(module, Float8Linear)]
    if not layers:
        return None
    return "fp8_dynamic" if any(layer.rounds_inputs for layer in layers) else "fp8"


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight `[F, D]` divided by the scales of its rows and rounded to FP8, and the scales, `[F]` float32.

    Scales are powers of two. They cost no precision, since FP8 has exponents of its own, and a row that is scaled back
    to bfloat16 is exact.
    """
    precise = weight.float()
    mantissa, exponent = torch.frexp(precise.abs().amax(dim=1) / LARGEST)
    scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    return (precise / scale[:, None]).to(torch.float8_e4m3fn), scale
