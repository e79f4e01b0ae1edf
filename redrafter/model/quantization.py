"""Quantised targets: weights of FP8 of our own, and whether other quantisers' models are still verified exactly.

Our linear layers have weights of FP8 (e4m3): half the bytes of bfloat16, where reading weights takes most of the time.
What a layer writes keeps its dtype. What it reads does so too, or is rounded to FP8 with a scale for each token. Either
way a token is computed as it would be without the tokens beside it.

Of other quantisers the arithmetic is transformers' and their own; nothing but the config is read here. Weights that are
quantised change nothing for drafting. Activations do where tokens of one forward share a scale that is made of all.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from redrafter.kernels.linear_operators import float8_linear, rounded_float8_linear

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
        """Quantise a layer, whose bias is shared, on a device where its weight then stays; None for where it is."""
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


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight `[F, D]` divided by the scales of its rows and rounded to FP8, and the scales, `[F]` float32.

    Scales are powers of two. They cost no precision, since FP8 has exponents of its own, and a row that is scaled back
    to bfloat16 is exact.
    """
    precise = weight.float()
    mantissa, exponent = torch.frexp(precise.abs().amax(dim=1) / LARGEST)
    scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    return (precise / scale[:, None]).to(torch.float8_e4m3fn), scale


def quantize_linears(
    model: nn.Module,
    *,
    keep: tuple[nn.Module | None, ...] = (),
    device: torch.device | str | None = None,
    rounds_inputs: bool = False,
) -> int:
    """Replace the linear layers of a model by FP8 ones, in place and for good, and return how many weights they have.

    Modules in `keep` stay as they are, with all that is in them; the rest is as in `Float8Linear`.
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
    """Return "fp8" where weights of a model's layers are our FP8, "fp8_dynamic" where inputs are too; else None."""
    layers = [module for module in model.modules() if isinstance(module, Float8Linear)]
    if not layers:
        return None
    return "fp8_dynamic" if any(layer.rounds_inputs for layer in layers) else "fp8"


def is_quantized(config: Any) -> bool:
    """Tell whether a model's config names a quantisation."""
    return _quantization(config) is not None


def shared_scales(config: Any) -> str | None:
    """Name the quantisation of a model in which a token's activation scales depend on other tokens of the forward.

    It is None where scales are static, of a token's own or not needed, and for methods that are not known here.
    """
    quantization = _quantization(config)
    if quantization is None:
        return None
    is_dict = isinstance(quantization, Mapping)
    method = quantization.get("quant_method") if is_dict else quantization.quant_method
    rule = _RULES.get(method or "bitsandbytes")  # which alone may leave its name out
    return None if rule is None else rule(quantization if is_dict else quantization.to_dict())


def warn_of_shared_scales(config: Any, name: str) -> None:
    """Warn where a quantised model cannot be verified exactly, naming its scheme."""
    scheme = shared_scales(config)
    if scheme is not None:
        warnings.warn(
            f"{name} is quantised with {scheme}: drafts change the scales of the tokens that are verified with them, "
            "so texts may differ from plain decoding's; only static and per-token scales are free of that",
            stacklevel=2,
        )


def _quantization(config: Any) -> Any:
    """Return the quantisation's entries in config.json, or the object that transformers made of them, or None."""
    for part in (config, config.get_text_config(decoder=True)):
        if getattr(part, "quantization_config", None):
            return part.quantization_config
    return None


def _compressed_tensors(entries: Mapping[str, Any]) -> str | None:
    groups = entries.get("config_groups") or {}
    for group in groups.values():
        for kind in ("input_activations", "output_activations"):
            args = group.get(kind) if isinstance(group, Mapping) else None  # a list of layers goes by a preset's name
            if args and args.get("dynamic") and _strategy(args) == "tensor":
                return "compressed-tensors, dynamic per-tensor activations"
    cache = entries.get("kv_cache_scheme")
    # Keys have heads where activations have tokens, so that "token" means a head of a row there.
    if cache and cache.get("dynamic") and _strategy(cache) in ("tensor", "token"):
        return f"compressed-tensors, dynamic per-{_strategy(cache)} keys and values"
    return None


def _strategy(args: Mapping[str, Any]) -> str:
    """Return the granularity of scales, as compressed-tensors fills it in where it is left out."""
    return args.get("strategy") or ("group" if args.get("group_size") else "tensor")


def _torchao(entries: Mapping[str, Any]) -> str | None:
    for kind, data in _torchao_configs(entries.get("quant_type")):
        if "DynamicActivation" not in kind:
            continue
        per_row = not kind.startswith("Float8DynamicActivationFloat8Weight")  # by default
        granularity = data.get("granularity") or {"_type": "PerRow" if per_row else "PerTensor"}
        if isinstance(granularity, list):
            granularity = granularity[0]  # of activations; the other is of weights
        two_level = kind.startswith("NVFP4") and data.get("use_dynamic_per_tensor_scale", True)
        if two_level or granularity["_type"] == "PerTensor":
            return f"torchao, {kind} with dynamic per-tensor activations"
    return None


def _torchao_configs(entry: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the names and fields of all configs in one, which may hold others, by layer."""
    if not isinstance(entry, Mapping):
        return
    if isinstance(entry.get("_type"), str) and isinstance(entry.get("_data"), Mapping):
        yield entry["_type"], entry["_data"]
    for value in entry.values():
        yield from _torchao_configs(value)


def _bitsandbytes(entries: Mapping[str, Any]) -> str | None:
    if entries.get("load_in_8bit") and entries.get("llm_int8_threshold", 6.0) > 0:
        return "bitsandbytes, LLM.int8(), whose outlier columns are found over all tokens"
    return None


# Methods not named here quantise weights alone (GPTQ, AWQ, AQLM, HQQ, EETQ, MXFP4, ...), have scales of a token's own
# (fbgemm_fp8, fp8, BitNet), or do what cannot be known from the config (Quark, FP-Quant, ...).
_RULES: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "torchao": _torchao,
}
