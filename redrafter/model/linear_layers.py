"""Linear layers in our forwards: fused layers, the bytes that they read, and the activation scales of other quantisers.

A small product does not use a GPU's full memory bandwidth: the query, key, value, gate and up projections of an 8B
model take a seventh longer one by one than two at a time. So layers that read the same tensor are fused into one
product. Such layers are found by watching a forward, not by name.

Other quantisers' layers are computed by transformers and their own code; only their config is read here. Quantised
weights do not affect exactness. Quantised activations do if the tokens of one forward share a scale.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from redrafter.errors import CheckpointError, warn
from redrafter.kernels.linear_operators import has_thin_kernel, thin_linear
from redrafter.model.patch import ModelPatch, Running, find_places, has_hooks
from redrafter.model.quantized_layers import BUFFERS, Float8Linear, GroupedLinear, QuantizedLinear, quantized_layers


@contextmanager
def linear_calls(model: nn.Module) -> Iterator[list[tuple[str, Tensor, Tensor]]]:
    """Record the calls of unmodified linear layers inside the context: name of the layer, input and output."""
    calls: list[tuple[str, Tensor, Tensor]] = []  # keeps the tensors alive, so that ids stay unique
    with ModelPatch() as patch:
        for name, module in model.named_modules():
            if is_unmodified_linear(module):
                patch.hook(module, lambda _, args, output, name=name: calls.append((name, args[0], output)))
        yield calls


def is_unmodified_linear(module: nn.Module) -> bool:
    """Return whether a call of a layer is only a product with its weight.

    Other quantisers keep the layer's class, and replace the forward of the object (compressed-tensors) or the class of
    its weight (torchao). A hook may change a layer's input and output.
    """
    return (
        type(module) in (nn.Linear, Float8Linear, GroupedLinear)
        and "forward" not in vars(module)
        and type(module.weight) is nn.Parameter
        and not has_hooks(module)
    )


def same_inputs(calls: Sequence[tuple[str, Tensor, Tensor]]) -> list[list[str]]:
    """Group the names of linear layers by the tensor that they read, in the order recorded by `linear_calls`.

    A layer that is called twice is in no group; many groups have one layer.
    """
    groups: dict[int, list[str]] = {}
    for name, x, _ in calls:
        groups.setdefault(id(x), []).append(name)
    names = [name for name, _, _ in calls]
    return [group for group in groups.values() if all(names.count(name) == 1 for name in group)]


class _FusedGroup:
    """State shared by the stand-ins of one group: the fused layer, and its output until all have read their part."""

    def __init__(self, layers: Sequence[Any], fused: Any, thin: bool, running: Running):
        self.layers, self.fused, self.thin, self.running = layers, fused, thin, running
        self.sizes = [module.out_features for module in layers]
        self.outputs: Any = None  # of all layers, until the last one has read its part


class _FirstStandIn(nn.Module):
    """A stand-in for the first layer of a group, which computes the product of all.

    It has the layer's weight, bias, widths and mode, which the model's code and adapters may read.
    """

    def __init__(self, module: nn.Linear, group: _FusedGroup, index: int):
        super().__init__()
        self.weight, self.bias, self.group, self.index = module.weight, module.bias, group, index
        self.in_features, self.out_features = module.in_features, module.out_features
        self.train(module.training)

    def forward(self, x: Tensor) -> Tensor:
        """Compute all layers' outputs, and return the first one's."""
        group = self.group
        if group.running.elsewhere():
            return self.compute_alone(x)
        out: Tensor = thin_linear(x, group.fused.weight) if group.thin else group.fused(x)
        if len(group.sizes) == 1:
            return out
        group.outputs = out.split(group.sizes, dim=-1)
        return group.outputs[0]

    def compute_alone(self, x: Tensor) -> Tensor:
        """Return what the layer itself computes, for a forward of another thread."""
        output: Tensor = self.group.layers[self.index](x)
        return output


class _NextStandIn(_FirstStandIn):
    """A stand-in for a later layer of a group, which returns its part of the product."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        if self.group.running.elsewhere():
            return self.compute_alone(x)
        output = self.group.outputs[self.index]
        # The last layer drops the product, which would else occupy memory until the next forward.
        if self.index == len(self.group.sizes) - 1:
            self.group.outputs = None
        return output


class FusedLinears:
    """The groups of linear layers of a model that are fused into one product each, in forwards that apply them.

    The weights of a group move into one tensor, of which each becomes a view: with the same values, shapes and memory.
    Groups in which only some layers have a bias, or in which dtypes or devices differ, are not fused.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Sequence[str]], *, thin: bool = True):
        """Fuse the weights of groups of a model's layers, by name. thin: allow the kernel for few tokens."""
        self._running, stand_ins = Running(), dict[nn.Module, nn.Module]()
        for names in groups:
            layers: list[Any] = [model.get_submodule(name) for name in names]
            fused = fuse_layers(layers) if len(layers) > 1 else layers[0]
            by_kernel = thin and fused is not None and fused.bias is None and has_thin_kernel(fused.weight)
            if fused is None or (fused is layers[0] and not by_kernel):
                continue
            group = _FusedGroup(layers, fused, by_kernel, self._running)
            for index, module in enumerate(layers):
                stand_ins[module] = (_NextStandIn if index else _FirstStandIn)(module, group, index)
        self._places = find_places(model, stand_ins)

    def add_to(self, patch: ModelPatch) -> None:
        """Have stand-ins in the places of the layers."""
        patch.put_stand_ins(self._places, self._running, None)


def fuse_layers(layers: Sequence[Any]) -> Any:
    """Return one layer whose output is that of linear layers, concatenated; None where they cannot be one product.

    Their weights move into one tensor, of which each becomes a view, as those of `FusedLinears` do.
    """
    kinds = {(type(m), m.bias is None, m.weight.dtype, m.weight.device, m.in_features) for m in layers}
    if len(kinds) > 1 or not all(map(is_unmodified_linear, layers)):
        return None
    names = {tuple((name, x.shape[1:]) for name, x in tensors_of(layer).items()) for layer in layers}
    if len(names) > 1:  # other groups, or minima in some layers alone
        return None
    whole = {name: _fuse([getattr(layer, name) for layer in layers]) for name in tensors_of(layers[0])}
    return with_tensors(layers[0], whole)


def tensors_of(layer: nn.Linear) -> dict[str, Tensor]:
    """Return the parameters and buffers of a linear layer by name; each has a row for every output feature."""
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def with_tensors(layer: nn.Linear, tensors: Mapping[str, Tensor]) -> Any:
    """Return a layer of the same class with other output features: these tensors in place of `tensors_of(layer)`."""
    kind: Any = type(layer)
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    made.in_features, made.out_features = layer.in_features, len(tensors["weight"])
    for name in ("weight", "bias"):
        x = tensors.get(name)
        made.register_parameter(name, None if x is None else nn.Parameter(x, requires_grad=False))
    for name in BUFFERS if isinstance(layer, QuantizedLinear) else ():
        made.register_buffer(name, tensors.get(name))
    return made


def _fuse(tensors: Sequence[Tensor]) -> Tensor:
    """Return one tensor that contains all of these, which become views of it."""
    first, rows = tensors[0], sum(map(len, tensors))
    addresses = accumulate((tensor.nbytes for tensor in tensors), initial=first.data_ptr())
    with torch.inference_mode(False), torch.no_grad():  # a tensor made in inference mode could never be trained again
        if all(
            tensor.is_contiguous() and (tensor.data_ptr(), tensor.untyped_storage().data_ptr()) == (address, stored)
            for tensor, address in zip(tensors, addresses, strict=False)
            for stored in [first.untyped_storage().data_ptr()]
        ):  # already fused by another engine or an earlier call
            return first.detach().as_strided((rows, *first.shape[1:]), first.stride())
        whole = torch.cat([tensor.detach() for tensor in tensors])
        for tensor, part in zip(tensors, whole.split([len(tensor) for tensor in tensors]), strict=True):
            # The parameter object stays, as optimizers and the model's owner hold it.
            tensor.data = part
    return whole


def forward_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of the weights that one forward of `model` reads.

    These are all weights except the embedding table, of which a forward reads a few rows, unless it is also the head.
    For a mixture of experts it is an upper bound, as a forward reads only the chosen experts.
    """
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    skipped = set() if tied else set(map(id, embedding.parameters()))
    parts = {id(part): part for layer in quantized_layers(model) for part in layer.parts.values()}
    weights = parts | {id(weight): weight for weight in model.parameters() if id(weight) not in skipped}
    return sum(weight.nbytes for weight in weights.values())


def is_quantized(config: PretrainedConfig) -> bool:
    """Return whether a model's config names a quantisation."""
    return quantization_of(config) is not None


def shared_scales(config: PretrainedConfig) -> str | None:
    """Name the quantisation of a model in which a token's activation scales depend on other tokens of the forward.

    Returns None for static, per-token or no activation scales, and for unknown methods.
    """
    if (entries := quantization_of(config)) is None:
        return None
    rule = _RULES.get(entries.get("quant_method") or "bitsandbytes")  # the only method whose config may omit the name
    return None if rule is None else rule(entries)


def warn_of_rounding(config: PretrainedConfig, name: str, rounding: float) -> None:
    """Warn where drafts may change the output of a model, because it is quantised or rounds inside its layers.

    Args:
        config: Config of the model.
        name: Its name in the message.
        rounding: How much of their spread its logits change by with the smallest change of its inputs; 0 where it does
            not round.
    """
    reason = None
    if (scheme := shared_scales(config)) is not None:
        reason = f"is quantised with {scheme}: drafts change the scales of the tokens that are verified with them"
    elif rounding:
        reason = (
            "rounds numbers inside its layers, as quantised layers do: the last bits of its inputs change its logits "
            f"by {rounding:.1g} of their spread"
        )
    if reason is not None:
        warn(
            f"{name} {reason}. With drafts its output is as exact as in bfloat16: it may differ from undrafted "
            "decoding where two tokens are nearly tied (docs/quantization.md)"
        )


def quantization_of(config: PretrainedConfig) -> Mapping[str, Any] | None:
    """Return the quantisation's entries in config.json, also of an object that transformers made of them; else None."""
    for part in (config, config.get_text_config(decoder=True)):
        if entries := getattr(part, "quantization_config", None):
            if isinstance(entries, Mapping):
                return entries
            if not hasattr(entries, "to_dict"):
                raise CheckpointError(f"quantization_config must be an object with settings, got {entries!r}")
            return dict(entries.to_dict())
    return None


def _compressed_tensors(entries: Mapping[str, Any]) -> str | None:
    groups = entries.get("config_groups") or {}
    for group in groups.values():
        for kind in ("input_activations", "output_activations"):
            args = group.get(kind) if isinstance(group, Mapping) else None  # a preset's group is a list of layers
            if args and args.get("dynamic") and _strategy(args) == "tensor":
                return "compressed-tensors, dynamic per-tensor activations"
    cache = entries.get("kv_cache_scheme")
    # Key scales are per head where activation scales are per token, so "token" means one head of a row there.
    if cache and cache.get("dynamic") and _strategy(cache) in ("tensor", "token"):
        return f"compressed-tensors, dynamic per-{_strategy(cache)} keys and values"
    return None


def _strategy(args: Mapping[str, Any]) -> str:
    """Return the granularity of scales, with compressed-tensors' default where it is omitted."""
    return args.get("strategy") or ("group" if args.get("group_size") else "tensor")


def _torchao(entries: Mapping[str, object]) -> str | None:
    for kind, data in _torchao_configs(entries.get("quant_type")):
        if "DynamicActivation" not in kind:
            continue
        per_row = not kind.startswith("Float8DynamicActivationFloat8Weight")  # by default
        granularity = data.get("granularity") or {"_type": "PerRow" if per_row else "PerTensor"}
        if isinstance(granularity, list):
            granularity = granularity[0]  # of activations; the second one is of weights
        two_level = kind.startswith("NVFP4") and data.get("use_dynamic_per_tensor_scale", True)
        if two_level or granularity["_type"] == "PerTensor":
            return f"torchao, {kind} with dynamic per-tensor activations"
    return None


def _torchao_configs(entry: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
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
_RULES: dict[str, Callable[[Mapping[str, object]], str | None]] = {
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "torchao": _torchao,
}
