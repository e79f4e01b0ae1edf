"""Drafters of every form, with random weights."""

import torch

from helpers.models import VOCAB, tiny_drafter
from redrafter import RecurrentDrafter

# Form -> fields of its config that differ from the defaults.
FORMS: dict[str, dict] = {
    "published": {},
    "sum": {"rnn": False},
    "narrow": {"exit_dim": 24, "num_draft_layers": 1},
    "gated": {"recurrence": "gated"},
    "aux_hidden": {"target_layers": (0, 2)},
    "low_rank": {"head_rank": 8},
    "reduced": {"draft_vocab_size": 40},
    "context": {"context_window": 4, "context_heads": 2, "context_head_dim": 8},
    "all": {
        "recurrence": "gated",
        "target_layers": (0, 2),
        "head_rank": 8,
        "exit_dim": 24,
        "draft_vocab_size": 40,
        "context_window": 3,
        "context_heads": 4,
        "context_kv_heads": 2,
        "context_head_dim": 8,
    },
}


def random_drafter(**changes) -> RecurrentDrafter:
    """Make a tiny drafter whose weights are large enough for every part of it to matter."""
    drafter = tiny_drafter(**changes)
    for weight in drafter.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    if drafter.draft_ids is not None:
        drafter.draft_ids.copy_(torch.randperm(VOCAB)[: len(drafter.draft_ids)])
    return drafter
