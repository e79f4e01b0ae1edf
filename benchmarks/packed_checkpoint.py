"""Save models as directories that this library and others read, with ordinary weights or with weights of 4 bits.

Weights of 4 bits are compressed-tensors' `pack-quantized` with symmetric groups of 32, as llm-compressor's `W4A16`
writes them: vLLM has its fastest kernels for these, and this library reads them without minima.
"""

import copy
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from redrafter.errors import ArgumentError
from redrafter.files.atomic_file import share_weights

GROUP = 32
ROWS = 2048  # quantised at once, to bound the memory of their float32 copies
LEAST = 2.0**-17  # numbers of bfloat16 from this one to 65504 are exact in float16 too, which may hold the scales
LEVELS = torch.linspace(7.0, 11.5, 7).tolist()  # codes of a group's largest number, before they are clamped
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, "dynamic": False}
W4A16 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}


def save_checkpoint(model: PreTrainedModel, directory: Path, *, w4a16: bool) -> None:
    """Save a model without its tokenizer; with `w4a16`, its linear layers, except for the head, have 4 bits.

    Raises:
        ArgumentError: The inputs of a layer are no multiple of the group.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config, tensors = copy.deepcopy(model.config), dict(model.state_dict())
    config.architectures, config.dtype = [type(model).__name__], model.dtype
    if w4a16:
        config.quantization_config = W4A16
        for name, layer in model.named_modules():
            if isinstance(layer, torch.nn.Linear) and layer is not model.get_output_embeddings():
                if layer.in_features % GROUP:
                    raise ArgumentError(f"{name} has {layer.in_features} inputs, no multiple of {GROUP}")
                tensors |= {f"{name}.{part}": x for part, x in pack(tensors.pop(f"{name}.weight")).items()}
    contiguous = {name: x.cpu().contiguous() for name, x in tensors.items()}
    save_file(contiguous, directory / "model.safetensors", {"format": "pt"})
    config.save_pretrained(directory)
    share_weights(directory)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(directory)


@torch.no_grad()
def pack(weight: Tensor) -> dict[str, Tensor]:
    """Return a weight `[F, D]` in 4 bits, as tensors of the format by the ends of their names."""
    parts = [_quantize(rows.float().unflatten(1, (-1, GROUP))) for rows in weight.split(ROWS)]
    codes, scales = (torch.cat(each).squeeze(2) for each in zip(*parts, strict=True))
    fields = (codes.flatten(1).int() + 8).unflatten(1, (-1, 8)) << torch.arange(0, 32, 4, device=codes.device)
    words = fields.sum(2).to(torch.int32)
    return {"weight_packed": words, "weight_scale": scales.to(weight.dtype), "weight_shape": torch.tensor(weight.shape)}


def _quantize(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes from -8 to 7, `[F, G, 32]`, and the scales `[F, G, 1]` of the least squared error found.

    Several scales are tried for each group, and for each of them the best scale of its codes.
    """
    most = groups.abs().amax(2, keepdim=True)
    least, kept = torch.full_like(most, float("inf")), torch.full_like(most, LEAST)
    for level in LEVELS:
        scale = _rounded(most / level)
        for _ in range(2):
            codes = (groups / scale).round().clamp(-8, 7)
            error = (codes * scale - groups).square().sum(2, keepdim=True)
            least, kept = torch.minimum(error, least), torch.where(error < least, scale, kept)
            scale = _rounded((codes * groups).sum(2, keepdim=True) / codes.square().sum(2, keepdim=True).clamp(min=1))
    return (groups / kept).round().clamp(-8, 7), kept


def _rounded(scale: Tensor) -> Tensor:
    return scale.bfloat16().float().clamp(min=LEAST)
