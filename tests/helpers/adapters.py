"""Tiny models with LoRA adapters of PEFT's, and directories with such adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.models import tiny_model

peft = pytest.importorskip("peft")

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "up_proj", "gate_proj"]


def adapted(architecture: str = "llama", seed: int = 1, model: Any = None, **changes: Any) -> Any:
    """Return a tiny model with LoRA adapters that change what it writes."""
    settings = {"r": 4, "target_modules": PROJECTIONS, "task_type": "CAUSAL_LM", "lora_alpha": 32} | changes
    model = tiny_model(architecture) if model is None else model
    return randomized(peft.get_peft_model(model, peft.LoraConfig(**settings)).eval(), seed)


def randomized(model: Any, seed: int = 1) -> Any:
    """Give the adapters of a model random weights; new ones change nothing."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = 0.3 * torch.randn(weight.shape, generator=generator)
    return model


def saved(folder: Path, architecture: str = "llama", seed: int = 1, **changes: Any) -> tuple[Any, Path]:
    """Save an adapter of a tiny model, and return the `PeftModel` that PEFT loads from there, and the directory."""
    adapted(architecture, seed, **changes).save_pretrained(folder)
    return peft.PeftModel.from_pretrained(tiny_model(architecture), folder).eval(), folder
