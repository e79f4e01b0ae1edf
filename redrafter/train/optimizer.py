"""The optimizer of a drafter's weights, and its learning rate schedule."""

import math

import torch
from torch.optim import AdamW

from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.train.config import TrainConfig

__all__ = ["learning_rate_factor", "make_optimizer"]

ADAM_BETAS = (0.9, 0.95)


def make_optimizer(drafter: RecurrentDrafter, config: TrainConfig, device: torch.device) -> AdamW:
    """Make AdamW over all weights of a drafter; weight decay applies to matrices only."""
    weights = list(drafter.parameters())
    matrices, vectors = ([weight for weight in weights if (weight.dim() > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return AdamW(groups, lr=config.lr, betas=ADAM_BETAS, fused=device.type == "cuda")


def learning_rate_factor(fraction_done: float, warmup: float) -> float:
    """Return the learning rate as a share of its peak: linear up, times a cosine down to 0.

    Args:
        fraction_done: Share of the training that is done, from 0 to 1.
        warmup: Share of the training in which the rate rises from 0.
    """
    rise = fraction_done / warmup if fraction_done < warmup else 1.0
    return rise * (1 + math.cos(math.pi * fraction_done)) / 2
