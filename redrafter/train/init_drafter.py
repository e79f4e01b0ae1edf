"""Make untrained drafters for a base, of the form that suits it where the options leave it open."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.drafting.drafter_config import CONTEXT_HEADS, CONTEXT_KV_HEADS, DrafterConfig
from redrafter.model.supported import config_width
from redrafter.train.config import TrainConfig

MAX_EXIT_DIM = 8192  # a residual layer of 16,384 would have 268M parameters


def size_form(base: PretrainedConfig, config: TrainConfig) -> TrainConfig:
    """Choose the options of a new drafter's form that are None, to suit the base.

    docs/benchmarks.md (Training) has what each part is worth, measured at a hidden size of 512; larger bases get fewer
    heads and a smaller head in proportion, since these are read at every draft step.
    """
    base = base.get_text_config(decoder=True)
    width, depth = config_width(base), getattr(base, "num_hidden_layers", 0)
    exit_dim = config.exit_dim or min(2 * width, MAX_EXIT_DIM)
    if config.recurrence == "apple" or not config.rnn:
        form: dict[str, Any] = {"recurrence": "apple", "num_layers": 2, "target_layers": (), "head_rank": 0}
        window = config.context_window or 0
    else:
        rank = min(max(width // 4, 512), 1024)
        form = {
            "recurrence": "gated",
            "num_layers": 3,
            # The last layer's output is the last hidden state, which is read anyway.
            "target_layers": tuple(sorted({depth * part // 4 for part in (1, 2, 3)} & set(range(depth - 1)))),
            "head_rank": rank if rank < exit_dim else 0,
        }
        window = 512 if config.context_window is None else config.context_window
    form |= {"exit_dim": exit_dim, "context_window": window}
    if window:
        kv_heads = config.context_kv_heads or math.gcd(max(width // 2048, 1), config.context_heads or 0)
        per_kv_head = max(width // (256 * kv_heads), 4)
        form |= {"context_kv_heads": kv_heads, "context_heads": kv_heads * per_kv_head}
    return replace(config, **{name: value for name, value in form.items() if getattr(config, name) is None})


def form_of(drafter: DrafterConfig) -> dict[str, Any]:
    """Return the options of `size_form` with which a drafter was made."""
    form = {
        "recurrence": drafter.recurrence,
        "num_layers": drafter.num_draft_layers,
        "exit_dim": drafter.exit_dim,
        "target_layers": tuple(drafter.target_layers),
        "context_window": drafter.context_window or 0,
        "head_rank": drafter.head_rank or 0,
    }
    if drafter.context_window:
        form |= {"context_heads": drafter.context_heads, "context_kv_heads": drafter.context_kv_heads}
    return form


def new_config(base: PretrainedConfig, config: TrainConfig, draft_vocab_size: int | None = None) -> DrafterConfig:
    """Make the config of an untrained drafter.

    `base` is the base's config, and `draft_vocab_size` the number of ids that the drafter knows; None for all of the
    base's.
    """
    config, base = size_form(base, config), base.get_text_config(decoder=True)
    assert config.recurrence is not None, "size_form chose it"
    assert config.num_layers is not None, "size_form chose it"
    assert config.target_layers is not None, "size_form chose it"
    return DrafterConfig(
        vocab_size=base.vocab_size,
        hidden_size=config_width(base),
        exit_dim=config.exit_dim,
        num_draft_layers=config.num_layers,
        rnn=config.rnn,
        recurrence=config.recurrence,
        target_layers=config.target_layers,
        context_window=config.context_window or None,
        context_heads=config.context_heads or CONTEXT_HEADS,
        context_kv_heads=config.context_kv_heads or CONTEXT_KV_HEADS,
        context_head_dim=config.context_head_dim,
        head_rank=config.head_rank or None,
        draft_vocab_size=draft_vocab_size,
        draft_len_per_beam=config.draft_len,
    )


def new_drafter(model: PreTrainedModel, config: TrainConfig, draft_ids: Tensor | None = None) -> RecurrentDrafter:
    """Make an untrained float32 drafter for a base, on the CPU.

    `draft_ids` holds the base's ids that the drafter is to know, `[V']` int64; None for all.
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
            # Embeddings are often far smaller than hidden states. If the weights that read them were not scaled, the
            # drafter would take long to learn from which token it goes on.
            width, ids = drafter_config.hidden_size, torch.arange(min(1024, drafter_config.vocab_size))
            with torch.no_grad():
                embeddings = model.get_input_embeddings()(ids.to(model.device)).float()  # as the module returns them
                rms = float(embeddings.square().mean().sqrt().clamp(min=1e-6))
                if drafter_config.recurrence == "gated":
                    drafter.rnn_gate.weight[:, :width] *= 1 / rms  # the columns that read the embedding
                else:
                    nn.init.normal_(drafter.rnn_w.weight, std=1 / rms / width**0.5)
    if draft_ids is not None:
        drafter.draft_ids.copy_(draft_ids)
    return drafter


def _set_to_zero(linear: nn.Linear) -> None:
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
