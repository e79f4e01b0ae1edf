"""Checkpoints in the formats of compressed-tensors."""

from pathlib import Path
from typing import Any

import pytest

from helpers.models import tiny_model

PER_TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": True}


def save_compressed(folder: Path, name: str, model: Any = None) -> None:
    """Save a base as llm-compressor writes it; None for a tiny Llama.

    `name` is a preset scheme of compressed-tensors, or "FP8 per tensor" or "FP8 keys". Scales of weights are taken from
    the weights; the largest activation is taken to be 8.
    """
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )

    scheme = preset_name_to_scheme("FP8_DYNAMIC" if name == "FP8 keys" else name.split()[0], ["Linear"])
    if name == "FP8 per tensor":
        scheme.input_activations = QuantizationArgs(**PER_TENSOR)
    keys = QuantizationArgs(**PER_TENSOR | {"dynamic": False}) if name == "FP8 keys" else None
    model = model or tiny_model("llama")
    config = QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"], kv_cache_scheme=keys)
    apply_quantization_config(model, config)
    for module in model.modules():
        for scale in ("input_scale", "k_scale", "v_scale"):
            if hasattr(module, scale):
                getattr(module, scale).data.fill_(8 / 448)
        if hasattr(module, "weight_scale"):
            largest = module.weight.data.abs().amax(dim=1, keepdim=True)
            scale = largest if len(module.weight_scale) > 1 else largest.max()
            module.weight_scale.data.copy_(scale / (127 if name == "W8A8" else 448))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


def keys(**args: object) -> dict:
    """Return a quantisation config of keys and values alone, with these arguments."""
    return {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": args}
