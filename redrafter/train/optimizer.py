"""What moves a drafter's weights, and how fast."""

import math

import torch
from torch.optim import AdamW

from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.train.config import TrainConfig

__all__ = ["make_optimizer", "schedule"]

BETAS = (0.9, 0.95)


def make_optimizer(drafter: RecurrentDrafter, config: TrainConfig, device: torch.device) -> AdamW:
    """Of all weights; only matrices decay."""
    weights = list(drafter.parameters())
    matrices, vectors = ([weight for weight in weights if (weight.dim() > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return AdamW(groups, lr=config.lr, betas=BETAS, fused=device.type == "cuda")


def schedule(done: float, warmup: float) -> float:
    """Part of the peak learning rate when `done` of the training is done: linear up, a cosine down to 0."""
    return (done / warmup if done < warmup else 1.0) * (1 + math.cos(math.pi * done)) / 2
