"""Quantise a model when it is loaded, layer by layer and without data."""

from typing import Any

import torch
from torch import nn

from redrafter.errors import ArgumentError, UnsupportedError, warn
from redrafter.features import FP8_WEIGHTS, GROUPED_WEIGHTS, QUANTISED_WEIGHTS, Feature, FeatureSet
from redrafter.files.dtype_names import dtype_name
from redrafter.kernels.grouped_linear import is_fast
from redrafter.kernels.grouped_weight import BLOCK
from redrafter.model.linear_layers import is_quantized
from redrafter.model.quantized_layers import (
    HEAD_SCHEMES,
    GroupedLinear,
    check_saved,
    quantize_linears,
    quantized_form,
    quantized_layers,
    widen_layers,
)
from redrafter.parallel.local_shards import SummedLinear

QUANTIZED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def feature_of(quantization: str) -> Feature:
    """Return the feature of a model that is quantised when it is loaded."""
    return FP8_WEIGHTS if quantization == "fp8" else GROUPED_WEIGHTS


def quantize_model(model: Any, name: str, scheme: str, device: torch.device | str | None = None) -> None:
    """Replace the linear layers of a Hugging Face model by quantised ones, and its head as the scheme says.

    Each weight is moved to `device` first, so that the others need no memory there; None leaves it where it is.
    """
    feature = feature_of(scheme)
    if is_quantized(model.config):
        FeatureSet(name, QUANTISED_WEIGHTS).check(feature)
    if (form := quantized_form(model)) is not None:
        raise UnsupportedError(f"{name} has {form} already, and weights are quantised once: {feature.remedy}")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    dtype = embedding.weight.dtype
    on_gpu = torch.device(embedding.weight.device if device is None else device).type == "cuda"
    if dtype not in QUANTIZED_DTYPES or (on_gpu and dtype == torch.float32 and scheme == "fp8"):
        raise ArgumentError(
            f"{feature.words} are multiplied in bfloat16, float16 or float32, FP8 on a GPU not in float32, and {name} "
            f"has {dtype_name(dtype)}: add dtype='bfloat16' (--dtype bfloat16)"
        )
    # accelerate's hooks keep weights on the meta device until a layer runs.
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise UnsupportedError(
            f"{name} is moved to its device layer by layer, and is not in memory to be quantised: leave out "
            f"device_map, or {feature.remedy}"
        )
    # By identity, since a tied head is the embedding's own parameter.
    held = {id(x) for module in (embedding, head) if module is not None for x in module.parameters()}
    count = sum(x.numel() for x in model.parameters() if id(x) not in held)
    quantized = quantize_linears(model, scheme, keep=(head,), device=device)
    if not quantized:
        of_groups = "" if scheme == "fp8" else f" whose input features are a multiple of {BLOCK}"
        raise UnsupportedError(f"{name} has no linear layers to quantise{of_groups}: {feature.remedy}")
    for split in (x for x in model.modules() if isinstance(x, SummedLinear)):
        if type(split.part) is nn.Linear and split.in_features % BLOCK == 0:
            raise UnsupportedError(
                f"{name}: {split.ranks.size} processes cannot share groups of {BLOCK} of {split.in_features} input "
                f"features: take fewer (--tensor-parallel-size), or {feature.remedy}"
            )
    if 2 * quantized < count:
        warn(
            f"only {quantized / count:.0%} of the weights of {name}, embedding and head apart, are in linear layers "
            f"and were quantised to {scheme}; the others, such as weights of experts, were not"
        )
    # A tied head gets a weight of its own, as the embedding is read by row.
    if (head_scheme := HEAD_SCHEMES[scheme]) is not None:
        quantize_linears(model, head_scheme, device=device)


def refuse_saving(model: Any, name: str) -> None:
    """Have a model with quantised weights of ours refuse to be saved, before anything is written."""
    if quantized_form(model) is not None:
        model.save_pretrained = lambda *_, **__: check_saved(model, name)


def settle_groups(model: Any, name: str, as_saved: bool) -> None:
    """Choose how a model with grouped weights, if it has any, computes on the device where it is now.

    On a CPU it computes in float32, unless another dtype was asked for (`as_saved` is false): products take as long
    as in bfloat16, and drafts are exact. Without a kernel, weights become ordinary ones.
    """
    if not any(isinstance(layer, GroupedLinear) for layer in quantized_layers(model)):
        return
    if model.device.type == "cpu" and as_saved:
        model.float()
    if not is_fast(model.device):
        form = quantized_form(model)
        widen_layers(model, model.get_input_embeddings().weight.dtype)
        warn(
            f"{name} is computed from ordinary weights with the numbers of its {form}, which takes more memory and "
            f"time: there is no kernel for such products here (docs/quantization.md)"
        )
