"""Make untrained drafters for a base."""

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.drafting.drafter_config import DrafterConfig
from redrafter.target.supported import config_width
from redrafter.train.config import TrainConfig

__all__ = ["new_config", "new_drafter"]


def new_config(base: PretrainedConfig, config: TrainConfig, draft_vocab_size: int | None = None) -> DrafterConfig:
    """Make the config of an untrained drafter.

    Args:
        base: Config of the base model.
        config: Options of the training.
        draft_vocab_size: Ids that the drafter knows; None for all of the base's.
    """
    base = base.get_text_config(decoder=True)
    return DrafterConfig(
        vocab_size=base.vocab_size,
        hidden_size=config_width(base),
        exit_dim=config.exit_dim,
        num_draft_layers=config.num_layers,
        rnn=config.rnn,
        recurrence=config.recurrence,
        target_layers=config.target_layers,
        context_window=config.context_window,
        context_heads=config.context_heads,
        context_kv_heads=config.context_kv_heads,
        context_head_dim=config.context_head_dim,
        head_rank=config.head_rank,
        draft_vocab_size=draft_vocab_size,
        draft_len_per_beam=config.draft_len,
    )


def new_drafter(model: PreTrainedModel, config: TrainConfig, draft_ids: Tensor | None = None) -> RecurrentDrafter:
    """Make an untrained float32 drafter for a base, on the CPU.

    Args:
        model: The base model.
        config: Options of the training.
        draft_ids: The base's ids that the drafter is to know, `[V']` int64; None for all.
    """
    drafter_config = new_config(model.config, config, None if draft_ids is None else len(draft_ids))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        drafter = RecurrentDrafter(drafter_config).float()
        for module in drafter.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
        for layer in drafter.layers:  # the residual layers start as the identity
            _set_to_zero(layer.linear)
        if drafter.fuse is not None:  # at first only the last hidden state counts
            _set_to_zero(drafter.fuse)
        if drafter.context is not None:  # at first nothing is read of the text
            nn.init.zeros_(drafter.context.out.weight)
        if config.rnn:
            _scale_embedding_input(drafter, drafter_config.hidden_size, 1 / _embedding_rms(model))
    if draft_ids is not None:
        drafter.draft_ids.copy_(draft_ids)
    return drafter


def _set_to_zero(linear: nn.Linear) -> None:
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)


@torch.no_grad()
def _scale_embedding_input(drafter: RecurrentDrafter, width: int, scale: float) -> None:
    """Scale the weights that read embeddings, which are often far smaller than hidden states.

    Without it, the drafter takes long to learn from which token it goes on.
    """
    if drafter.config.recurrence == "gated":
        drafter.rnn_gate.weight[:, :width] *= scale  # the columns that read the embedding
    else:
        nn.init.normal_(drafter.rnn_w.weight, std=scale / width**0.5)


@torch.no_grad()
def _embedding_rms(model: PreTrainedModel) -> float:
    """Return the root mean square of some of a base's embeddings, as its embedding module returns them."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(min(1024, vocabulary), device=model.device)
    return float(model.get_input_embeddings()(ids).float().square().mean().sqrt().clamp(min=1e-6))
