"""Tiny models with recurrent states, of every family that keeps them in transformers' cache."""

from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from zoo.check import random_model
from zoo.variants import variants

RECURRENT = (
    "bailing_hybrid",
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "mamba",
    "mamba2",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "zamba",
    "zamba2",
    "zaya",
)


@cache
def recurrent_model(model_type: str) -> PreTrainedModel:
    """Return a tiny random model of that type, in float32; the same one for all tests."""
    return random_model(model_type, variants(model_type)[0])


def generated_alone(model: PreTrainedModel, ids: Tensor, mask: Tensor, new: int, **arguments: object) -> Tensor:
    """Return what `model.generate` writes of each left-padded row `[B, P]` greedily, without padding and the others."""
    rows, arguments = [], {"max_new_tokens": new, "do_sample": False, **arguments}
    for row, seen in zip(ids, mask.bool(), strict=True):
        prompt = row[seen][None]
        text = model.generate(prompt, attention_mask=torch.ones_like(prompt), **arguments)
        rows.append(torch.cat([row[~seen], text[0]]))
    return torch.stack(rows)
