"""Create the optimizer of a training: AdamW, or Muon for hidden matrices with AdamW for all other weights.

Muon (Jordan et al. 2024) replaces the momentum of a matrix by the nearest orthogonal matrix, so that all its directions
change at one rate. Its steps are scaled to the root mean square of AdamW's (Liu et al. 2025, arXiv 2502.16982), so both
share a learning rate.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from redrafter.drafting.text_drafters import TrainableDrafter
from redrafter.errors import ArgumentError
from redrafter.train.config import TrainConfig

ADAM_BETAS = (0.9, 0.95)


class MuonWithAdamW(Optimizer):
    """Muon and AdamW as one optimizer, with one state dict, for gradient scalers and checkpoints.

    Args:
        hidden: Matrices for Muon.
        others: Weights for AdamW.
        lr: Learning rate of both.
        fused: Whether AdamW uses its fused kernel.
    """

    def __init__(self, hidden: Sequence[Tensor], others: Sequence[Tensor], lr: float, fused: bool):
        self._muon = torch.optim.Muon(hidden, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        self._adamw = AdamW([{"params": others}], lr=lr, betas=ADAM_BETAS, weight_decay=0.0, fused=fused)
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Make both optimizers use this one's groups and states."""
        self._muon.param_groups, self._adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        self._muon.state = self._adamw.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        # `load_state_dict` replaces groups and states through this method.
        super().__setstate__(state)
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Run a step of both optimizers."""
        self._muon.step()
        self._adamw.step()


def hidden_matrices(drafter: TrainableDrafter) -> list[Tensor]:
    """Return the trained matrices of a drafter's linear layers, or their low-rank updates, without its heads.

    Other matrices, such as embeddings and the codes of a selector, have a row for each id or position, as heads have.

    Raises `ArgumentError` if there are none.
    """
    heads = {id(weight) for weight in drafter.head_weights()}
    layers = [module for module in drafter.modules() if isinstance(module, nn.Linear)]
    weights = [weight for layer in layers for weight in layer.parameters(recurse=False) if weight.requires_grad]
    hidden: list[Tensor] = [weight for weight in weights if weight.dim() == 2 and id(weight) not in heads]
    if not hidden:
        raise ArgumentError("--optimizer muon is for hidden matrices, and this drafter has none: leave it out")
    return hidden


def check_optimizer(config: TrainConfig) -> None:
    """Raise `ArgumentError` if this version of torch lacks the optimizer."""
    if config.optimizer == "muon" and not hasattr(torch.optim, "Muon"):
        raise ArgumentError(
            f"--optimizer muon needs torch 2.9 or newer, and this is {torch.__version__}: update torch, or leave it out"
        )


def make_optimizer(drafter: TrainableDrafter, config: TrainConfig, device: torch.device) -> Optimizer:
    """Create the optimizer of all weights of a drafter that are not frozen."""
    check_optimizer(config)
    fused = device.type == "cuda"
    hidden = hidden_matrices(drafter) if config.optimizer == "muon" else []
    taken = {id(weight) for weight in hidden}
    weights = [weight for weight in drafter.parameters() if weight.requires_grad and id(weight) not in taken]
    if config.optimizer == "muon":
        return MuonWithAdamW(hidden, weights, config.peak_lr, fused)
    return AdamW(weights, lr=config.peak_lr, betas=ADAM_BETAS, weight_decay=0.0, fused=fused)
