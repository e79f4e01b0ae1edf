"""Quantise models and drafters when they are loaded."""

import warnings
from pathlib import Path
from typing import Any

import torch

from redrafter.drafting.drafter_types import Drafter
from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.files.dtype_names import dtype_name
from redrafter.target.quantization import is_quantized, quantize_linears

__all__ = ["QUANTIZATIONS", "check_quantization", "quantize_drafter", "quantize_model"]

QUANTIZATIONS = ("fp8", "fp8_dynamic")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_quantization(quantization: str | None, model: object, argument: str = "quantization") -> None:
    """Check how a model is to be quantised, before anything is loaded.

    Args:
        quantization: One of `QUANTIZATIONS`, or None for not at all.
        model: What is to be quantised, as it is given to `from_pretrained`; None for what a checkpoint holds.
        argument: Name of the argument, for messages.

    Raises:
        ArgumentError: There is no such quantisation, or the model is loaded already.
    """
    if quantization is None:
        return
    if quantization not in QUANTIZATIONS:
        raise ArgumentError(f"{argument} must be {', '.join(map(repr, QUANTIZATIONS))} or None, got {quantization!r}")
    if model is not None and not isinstance(model, str | Path):
        raise ArgumentError(f"{argument}: for a model that is loaded by name; this one is loaded, leave it out")


def quantize_model(
    model: Any, name: str, device: torch.device | str | None = None, *, quantization: str = "fp8"
) -> None:
    """Replace the linear layers of a model, its head apart, by FP8 ones.

    Args:
        model: A Hugging Face model.
        name: What to call it in messages.
        device: Where each weight is moved first, so that the others need no memory there; None for where it is.
        quantization: One of `QUANTIZATIONS`.

    Raises:
        ArgumentError: It has another dtype than FP8 weights are multiplied in.
        UnsupportedError: It is quantised already, is not whole in memory, or has no linear layers.
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
    quantized = quantize_linears(model, keep=(head,), device=device, rounds_inputs=_rounds_inputs(quantization))
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

    Args:
        drafter: The drafter.
        quantization: One of `QUANTIZATIONS`.
    """
    quantize_linears(drafter, keep=(drafter.unquantized,), rounds_inputs=_rounds_inputs(quantization))


def _rounds_inputs(quantization: str) -> bool:
    return quantization == "fp8_dynamic"
