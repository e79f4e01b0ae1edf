"""What moves a drafter's weights, and how fast."""

import math

import torch
from torch.optim import AdamW, Optimizer

from redrafter.drafter import RecurrentDrafter
from redrafter.errors import ArgumentError
from redrafter.train.config import TrainConfig

__all__ = ["make_optimizers", "schedule", "state_size"]

BETAS = (0.9, 0.95)


def make_optimizers(drafter: RecurrentDrafter, config: TrainConfig, device: torch.device) -> list[Optimizer]:
    """One, or with muon two: that is for matrices that turn one state into another, so not for the head, whose rows
    are tokens. Raises `ArgumentError` where this torch has no muon."""
    inner = _inner(drafter) if config.optimizer == "muon" else []
    rest = [weight for weight in drafter.parameters() if not any(weight is other for other in inner)]
    matrices, vectors = ([weight for weight in rest if (weight.dim() > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    adamw = AdamW(groups, lr=config.lr, betas=BETAS, fused=device.type == "cuda")
    if not inner:
        return [adamw]
    if config.mixed_precision == "fp16":
        raise ArgumentError("--optimizer muon does not go with --mixed-precision fp16; use bf16")
    muon = getattr(torch.optim, "Muon", None)
    if muon is None:
        raise ArgumentError(f"--optimizer muon needs torch 2.9 or newer, this is {torch.__version__}; use adamw")
    # Scaled to AdamW's size of steps, so that one learning rate suits both.
    return [adamw, muon(inner, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")]


def state_size(drafter: RecurrentDrafter, config: TrainConfig) -> int:
    """Numbers that the optimizers keep: two for each weight, muon's one."""
    inner = sum(weight.numel() for weight in _inner(drafter)) if config.optimizer == "muon" else 0
    return 2 * sum(weight.numel() for weight in drafter.parameters()) - inner


def schedule(done: float, warmup: float) -> float:
    """Part of the peak learning rate when `done` of the training is done: linear up, a cosine down to 0."""
    return (done / warmup if done < warmup else 1.0) * (1 + math.cos(math.pi * done)) / 2


def _inner(drafter: RecurrentDrafter) -> list[torch.nn.Parameter]:
    named = drafter.named_parameters()
    return [weight for name, weight in named if weight.dim() == 2 and not name.startswith("lm_head")]
