"""Quantised targets: whether drafts change how the activations of the tokens beside them are rounded.

The arithmetic is transformers' and the quantiser's own; nothing but the config is read here. Weights that are quantised
change nothing for drafting. Activations do where tokens of one forward share a scale that is made of all of them.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["is_quantized", "shared_scales", "warn_of_shared_scales"]


def is_quantized(config: Any) -> bool:
    """Tell whether a model's config names a quantisation."""
    return _quantization(config) is not None


def shared_scales(config: Any) -> str | None:
    """Name the quantisation of a model in which a token's activation scales depend on other tokens of the forward.

    Args:
        config: Config of a Hugging Face model.

    Returns:
        The scheme, for messages; None where scales are static, of a token's own or not needed, and for methods that are
        not known here.
    """
    quantization = _quantization(config)
    if quantization is None:
        return None
    is_dict = isinstance(quantization, Mapping)
    method = quantization.get("quant_method") if is_dict else quantization.quant_method
    rule = _RULES.get(method or "bitsandbytes")  # which alone may leave its name out
    return None if rule is None else rule(quantization if is_dict else quantization.to_dict())


def warn_of_shared_scales(config: Any, name: str) -> None:
    """Warn where a quantised model cannot be verified exactly, naming its scheme.

    Args:
        config: Config of the model.
        name: What to call the model.
    """
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
