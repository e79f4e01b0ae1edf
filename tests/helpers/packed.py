"""Tensors and checkpoints of AWQ and GPTQ, packed slowly as their formats say."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from redrafter.model.packed_weights import PackedWeight

GROUP = 32
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
PLAIN = {"int4_packing_format": {"_type": "Int4PackingFormat", "_data": "PLAIN"}}
TORCHAO = {
    "quant_method": "torchao",
    "bits": 4,
    "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": PLAIN}},
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return the words `[R, C * bits / 32]` of codes, each with its first code in its lowest bits."""
    fields = codes.long().reshape(len(codes), -1, 32 // bits)
    return (fields << torch.arange(0, 32, bits)).sum(2).to(torch.int32)


def as_awq(weight: PackedWeight) -> dict[str, Tensor]:
    """Return the tensors of AutoAWQ's version "gemm"."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    words = lambda x: pack(x.T.reshape(x.shape[1], -1, 8)[:, :, order].flatten(1), 4)  # noqa: E731
    return {"qweight": words(weight.codes), "qzeros": words(weight.zero), "scales": weight.scale.T.contiguous()}


def as_gptq(weight: PackedWeight, less: int = 1) -> dict[str, Tensor]:
    """Return the tensors of GPTQ, with codes of zero less a number: 1, or 0 in the second version."""
    features = weight.codes.shape[1]
    neighbours = torch.arange(features) // (features // weight.scale.shape[1])
    return {
        "qweight": pack(weight.codes, weight.bits).T.contiguous(),
        "qzeros": pack((weight.zero.T - less) & (1 << weight.bits) - 1, weight.bits),
        "scales": weight.scale.T.contiguous(),
        "g_idx": (neighbours if weight.group_of is None else weight.group_of).int(),
    }


def as_compressed(weight: PackedWeight) -> dict[str, Tensor]:
    """Return the tensors of compressed-tensors' format pack-quantized, of a symmetric weight."""
    return {
        "weight_packed": pack(weight.codes, weight.bits),
        "weight_scale": weight.scale,
        "weight_shape": torch.tensor(weight.codes.shape),
    }


def as_torchao(weight: PackedWeight) -> dict[str, Tensor]:
    """Return the tensors of torchao's plain Int4Tensor: signed codes, and what their zero means."""
    codes = weight.codes ^ 8
    return {
        "_weight_qdata": (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8),
        "_weight_scale": weight.scale.T,
        "_weight_zero_point": ((8 - weight.zero) * weight.scale).T,
    }


def quantize(weight: Tensor, bits: int, *, symmetric: bool = False) -> PackedWeight:
    """Round a weight `[F, D]` to codes, with a scale and a code of zero for each group."""
    grouped = weight.detach().float().unflatten(1, (-1, GROUP))
    least, most = grouped.aminmax(dim=2)
    if symmetric:
        most = torch.maximum(most, -least)
        least = -most * (1 << bits) / ((1 << bits) - 2)
    scale = ((most - least) / ((1 << bits) - 1)).half()
    zero = (-least / scale.float()).round().clamp(1, (1 << bits) - 1)
    codes = (grouped / scale.float()[:, :, None] + zero[:, :, None]).round().clamp(0, (1 << bits) - 1)
    return PackedWeight(bits, codes.flatten(1).to(torch.uint8), scale, zero.int())


def save_packed(
    folder: Path,
    model: PreTrainedModel,
    entries: Mapping[str, Any] = AWQ,
    tensors_of: Callable[[PackedWeight], dict[str, Tensor]] = as_awq,
    symmetric: bool = False,
) -> Path:
    """Save a model whose linear layers, its head apart, are packed, and give it their numbers."""
    model.save_pretrained(folder)
    state = model.state_dict()
    for name, layer in list(model.named_modules()):
        if type(layer) is torch.nn.Linear and layer is not model.get_output_embeddings():
            weight = quantize(
                state.pop(f"{name}.weight"), entries["bits"], symmetric=symmetric or tensors_of is as_compressed
            )
            layer.weight.data = weight.dequantize().to(layer.weight.dtype)
            state |= {f"{name}.{part}": x.contiguous() for part, x in tensors_of(weight).items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    save_file({name: x.contiguous() for name, x in state.items()}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": dict(entries)}))
    return folder
