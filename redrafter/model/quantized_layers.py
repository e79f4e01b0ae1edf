"""Linear layers with quantised weights of our own: FP8 (e4m3), and groups of small integers.

Where reading weights takes most of the time, a layer with fewer bytes is faster. FP8 has half the bytes of bfloat16;
the inputs of such a layer are rounded to FP8 too, with a scale for each token, so the other tokens of a forward do not
affect a token. Groups of 4 or 8 bits (`GroupedWeight`) leave the inputs as they are. The output keeps its dtype.

Layers are made of ordinary ones when a model is loaded (`SCHEMES`), or have the numbers of a file that is quantised.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from redrafter.errors import UnsupportedError
from redrafter.kernels.grouped_linear import multiply_grouped
from redrafter.kernels.grouped_weight import BLOCK, GroupedWeight, join_rows, quantize_groups
from redrafter.kernels.linear_operators import float8_linear

LARGEST = torch.finfo(torch.float8_e4m3fn).max
BUFFERS = "weight_scale", "weight_minimum"  # parts of a quantised weight that are no parameters
MAX_ROUNDED_NUMBERS = 1 << 24  # of a weight that is quantised at once, which needs several copies in float32


def multiply_blocks(weight: Tensor, scale: Tensor, block: Sequence[int]) -> Tensor:
    """Return a weight `[M, N]` multiplied by the scales of its blocks, float32; the last blocks may be cut.

    Args:
        weight: The weight, in FP8.
        scale: The scale of each block, `[ceil(M / block[0]), ceil(N / block[1])]`.
        block: Rows and columns of a block.
    """
    rows, columns = (torch.arange(count) // size for count, size in zip(weight.shape, block, strict=True))
    return weight.float() * scale.float()[rows][:, columns]


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is numbers of one byte, with scales, and minima or none; a base class.

    Attributes:
        weight: The numbers, `[F, ...]`, a parameter without gradient.
        weight_scale: Their scales, `[F]` or `[F, groups]`.
        weight_minimum: What is added in each group, in the shape of the scales; None for those of `GroupedWeight`.
        requantizes: Whether a new weight may be quantised as this one was. It may not where a file has the numbers, as
            other code has made them.
    """

    weight_scale: Tensor
    weight_minimum: Tensor | None
    requantizes = True

    def __init__(self, layer: nn.Linear, parts: Mapping[str, Tensor]):
        """Make the layer that replaces another one, with its sizes, bias and mode, of the parts of a weight by name."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = nn.Parameter(parts["weight"], requires_grad=False)
        self.bias = layer.bias
        self.register_buffer("weight_scale", parts["weight_scale"])
        self.register_buffer("weight_minimum", parts.get("weight_minimum"))
        self.train(layer.training)

    @property
    @abstractmethod
    def form(self) -> str:
        """Return the name of the weight's form in messages, such as "FP8 weights"."""

    @abstractmethod
    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the parts, by name, of a new weight `[F, D]`, in the sizes and dtypes that `parts` has."""

    @abstractmethod
    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight as that of an ordinary layer, `[F, D]`."""

    @abstractmethod
    def multiply(self, x: Tensor, columns: slice, bias: Tensor | None) -> Tensor:
        """Return the product of inputs `[..., d]` with the weight's columns of those d input features, plus a bias."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to `[..., D]`."""
        return self.multiply(x, slice(None), self.bias)

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors that make up the weight, by name."""
        parts = {name: getattr(self, name) for name in ("weight", *BUFFERS)}
        return {name: part for name, part in parts.items() if part is not None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> object:
        """Apply a function that moves or casts tensors: a cast changes the bias alone."""

        def without_cast(tensor: Tensor) -> Tensor:
            return fn(tensor) if tensor is self.bias else fn(tensor.view(torch.uint8)).view(tensor.dtype)

        return super()._apply(without_cast, recurse)


class Float8Linear(QuantizedLinear):
    """A linear layer whose weight is FP8, with a scale for each output feature, and whose inputs are rounded to FP8.

    Attributes:
        weight: The weight divided by its scales, `[F, D]` float8_e4m3fn.
        weight_scale: Multiplier of each row of the weight, `[F]` float32.
    """

    form = "FP8 weights"

    def __init__(self, layer: nn.Linear, device: torch.device | str | None = None):
        """Quantise a layer, sharing its bias; its weight then stays on `device`, or where it is for None."""
        super().__init__(layer, self.quantize(layer.weight.detach().to(device)))

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the parts of a new weight; see `QuantizedLinear`."""
        return dict(zip(("weight", "weight_scale"), quantize_weight(weight), strict=True))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight as that of an ordinary layer, `[F, D]`."""
        return (self.weight.float() * self.weight_scale[:, None]).to(dtype)

    def multiply(self, x: Tensor, columns: slice, bias: Tensor | None) -> Tensor:
        """Return the product with some of the input features; see `QuantizedLinear`."""
        product: Tensor = float8_linear(x, self.weight[:, columns], self.weight_scale, bias)
        return product


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight `[F, D]` divided by the scales of its rows and rounded to FP8, and the scales, `[F]` float32.

    Scales are powers of two. They cost no precision, since FP8 numbers have an exponent, and a row scaled back to
    bfloat16 is exact.
    """
    precise = weight.float()
    mantissa, exponent = torch.frexp(precise.abs().amax(dim=1) / LARGEST)
    # frexp returns mantissas from 0.5 up to 1, so a power of two would get a scale that is twice too large.
    scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    return (precise / scale[:, None]).to(torch.float8_e4m3fn), scale


class GroupedLinear(QuantizedLinear):
    """A linear layer whose weight is a `GroupedWeight`: codes of 4 or 8 bits with scales for groups of input features.

    Attributes:
        weight: Its codes, `[F, D / 2]` uint8 or `[F, D]` int8.
        weight_scale: Its scales, `[F, groups]` float16 or float32.
        weight_minimum: Its minima, likewise; None for none.
    """

    def __init__(self, layer: nn.Linear, weight: GroupedWeight, *, requantizes: bool = False):
        """Make the layer that replaces another one, sharing its bias; the weight of that one is not read."""
        super().__init__(layer, _parts(weight))
        self.requantizes = requantizes

    def grouped(self) -> GroupedWeight:
        """Return the weight."""
        return GroupedWeight(self.weight, self.weight_scale, self.weight_minimum)

    @property
    def form(self) -> str:
        """Return the name of the weight's form; see `QuantizedLinear`."""
        weight = self.grouped()
        return f"int{weight.bits} weights in groups of {weight.group}"

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the parts of a new weight; see `QuantizedLinear`."""
        return _parts(round_to_groups(weight, self.grouped().bits))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to `[..., D]`."""
        return multiply_grouped(x, self.weight, self.weight_scale, self.weight_minimum, self.bias)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight as that of an ordinary layer, `[F, D]`."""
        return self.grouped().dequantize(dtype)

    def multiply(self, x: Tensor, columns: slice, bias: Tensor | None) -> Tensor:
        """Return the product with some of the input features, whole groups; see `QuantizedLinear`."""
        weight = self.grouped().columns(columns)
        return multiply_grouped(x, weight.codes, weight.scale, weight.minimum, bias)


def _parts(weight: GroupedWeight) -> dict[str, Tensor]:
    parts = {"weight": weight.codes, "weight_scale": weight.scale}
    return parts if weight.minimum is None else parts | {"weight_minimum": weight.minimum}


def round_to_groups(weight: Tensor, bits: int) -> GroupedWeight:
    """Quantise a weight `[F, D]` to the nearest codes of 4 or 8 bits, a few rows at a time, in groups of `BLOCK`."""
    pieces = [quantize_groups(rows, bits) for rows in weight.split(max(MAX_ROUNDED_NUMBERS // weight.shape[1], 1))]
    return join_rows(pieces)


def _rounded_to_groups(layer: nn.Linear, device: torch.device | str | None, *, bits: int) -> GroupedLinear | None:
    if layer.in_features % BLOCK:
        return None
    return GroupedLinear(layer, round_to_groups(layer.weight.detach().to(device), bits), requantizes=True)


# By name, what makes a quantised layer of an ordinary one, with its weight on a device, or where it is for None; it
# returns None for a layer whose sizes do not fit.
SCHEMES: Mapping[str, Callable[[nn.Linear, torch.device | str | None], QuantizedLinear | None]] = {
    "fp8": Float8Linear,
    "int4": partial(_rounded_to_groups, bits=4),
    "int8": partial(_rounded_to_groups, bits=8),
}
HEAD_SCHEMES = {"fp8": None, "int4": "int8", "int8": "int8"}  # of the head of a model; None leaves it as it is


def quantize_linears(
    model: nn.Module, scheme: str, *, keep: tuple[nn.Module | None, ...] = (), device: torch.device | str | None = None
) -> int:
    """Replace the linear layers of a model by quantised ones, permanently, and return the number of their weights.

    Args:
        model: The model.
        scheme: One of `SCHEMES`. Layers whose sizes do not fit it are unchanged.
        keep: Modules that are unchanged, with all their submodules.
        device: Device of the new weights; None for where they are.
    """
    kept = {id(module) for root in keep if root is not None for module in root.modules()}

    def quantized(layer: nn.Module) -> nn.Linear | None:
        return None if type(layer) is not nn.Linear or id(layer) in kept else SCHEMES[scheme](layer, device)

    return sum(layer.in_features * layer.out_features for layer in replace_layers(model, quantized))


def widen_layers(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace the quantised layers of a model by ordinary ones with the same numbers in a dtype, permanently."""

    def widened(layer: nn.Module) -> nn.Linear | None:
        if not isinstance(layer, QuantizedLinear):
            return None
        with torch.device("meta"):
            made = nn.Linear(layer.in_features, layer.out_features, bias=False)
        made.weight, made.bias = nn.Parameter(layer.dequantize(dtype), requires_grad=False), layer.bias
        return made.train(layer.training)

    replace_layers(model, widened)


def replace_layers(model: nn.Module, make: Callable[[nn.Module], nn.Linear | None]) -> list[nn.Linear]:
    """Replace modules of a model by the layers made of them, and return these; None leaves a module as it is."""
    made: dict[int, nn.Linear] = {}
    # Outside of inference mode, or the weights could never be trained again.
    with torch.inference_mode(False), torch.no_grad():
        for parent in list(model.modules()):
            for name, child in parent._modules.items():
                # A layer that occurs twice stays one layer, or its weights would be stored twice.
                layer = None if child is None else made.get(id(child)) or make(child)
                if layer is not None:
                    made[id(child)] = parent._modules[name] = layer
    return list(made.values())


def quantized_layers(model: nn.Module) -> Iterator[QuantizedLinear]:
    """Yield the linear layers of a model that have quantised weights of ours."""
    return (module for module in model.modules() if isinstance(module, QuantizedLinear))


def quantized_form(model: nn.Module) -> str | None:
    """Name the form of most weights of ours that are quantised in a model, such as "FP8 weights"; None for none."""
    forms = Counter[str]()
    for layer in quantized_layers(model):
        forms[layer.form] += layer.in_features * layer.out_features
    return max(forms, key=forms.__getitem__, default=None)


def check_saved(model: nn.Module, name: str) -> None:
    """Raise `UnsupportedError` if weights of a model that is to be saved are quantised ones of ours."""
    if (form := quantized_form(model)) is not None:
        raise UnsupportedError(
            f"{name} is not saved with its {form}, which no library reads: keep the checkpoint that it was loaded from"
        )


def rounds_inputs(model: nn.Module) -> bool:
    """Return whether layers of ours in a model round their inputs."""
    return any(isinstance(layer, Float8Linear) for layer in quantized_layers(model))
