"""Quantise models and drafters when they are loaded."""

import warnings
from pathlib import Path
from typing import Any

import torch

from redrafter.drafting.drafter_types import Drafter
from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.files.dtype_names import dtype_name
from redrafter.model.linear_layers import is_quantized, quantize_linears

QUANTIZATIONS = ("fp8", "fp8_dynamic")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_quantization(quantization: str | None, model: object, argument: str = "quantization") -> None:
    """Raise `ArgumentError` unless `quantization` is one of `QUANTIZATIONS`, or None for not at all.

    The model must not be loaded yet; it is None for what a checkpoint holds.
    """
    if quantization not in (*QUANTIZATIONS, None):
        raise ArgumentError(f"{argument} must be {', '.join(map(repr, QUANTIZATIONS))} or None, got {quantization!r}")
    if not isinstance(model, str | Path | None) and quantization is not None:
        raise ArgumentError(f"{argument}: for a model that is loaded by name; this one is loaded, leave it out")


def quantize_model(
    model: Any, name: str, device: torch.device | str | None = None, *, quantization: str = "fp8"
) -> None:
    """Replace the linear layers of a Hugging Face model, its head apart, by FP8 ones.

    Each weight is moved to `device` first, so that the others need no memory there; None leaves it where it is.
    """
    argument = f"quantization={quantization!r} (--quantization {quantization})"
    if is_quantized(model.config):
        raise UnsupportedError(f"{name} is quantised already: leave out {argument}")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    dtype = embedding.weight.dtype
    on_gpu = torch.device(embedding.weight.device if device is None else device).type == "cuda"
    if dtype not in DTYPES or (on_gpu and dtype == torch.float32):
        raise ArgumentError(
            f"FP8 weights are multiplied in bfloat16 or float16, on a CPU in float32 too, and {name} has "
            f"{dtype_name(dtype)}: add dtype='bfloat16' (--dtype bfloat16)"
        )
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise UnsupportedError(
            f"{name} is moved to its device layer by layer, and is not in memory to be quantised: leave out "
            f"device_map, or {argument}"
        )
    held = {id(x) for module in (embedding, head) if module is not None for x in module.parameters()}
    count = sum(x.numel() for x in model.parameters() if id(x) not in held)
    quantized = quantize_linears(model, keep=(head,), device=device, rounds_inputs=quantization == "fp8_dynamic")
    if not quantized:
        raise UnsupportedError(f"{name} has no linear layers to quantise: leave out {argument}")
    if 2 * quantized < count:
        warnings.warn(
            f"only {quantized / count:.0%} of the weights of {name}, embedding and head apart, are in linear layers "
            "and were quantised to FP8; the others, such as those of experts, stay as they are",
            stacklevel=2,
        )


def quantize_drafter(drafter: Drafter, quantization: str = "fp8") -> None:
    """Replace the linear layers of a drafter by FP8 ones; what it drafts changes no token of a text.

    Its `unquantized` part stays as it is.
    """
    quantize_linears(drafter, keep=(drafter.unquantized,), rounds_inputs=quantization == "fp8_dynamic")
