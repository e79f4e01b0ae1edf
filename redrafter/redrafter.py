"""ReDrafter: a Hugging Face model that a recurrent drafter makes write faster."""

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from redrafter.checkpoint import TreeShape, check_beams, load_drafter, load_model
from redrafter.drafter import RecurrentDrafter
from redrafter.engine import Engine
from redrafter.proposer import RecurrentProposer
from redrafter.target import Target

__all__ = ["ReDrafter"]

CPU_NODE_BUDGET = 12  # a node costs arithmetic there; measured best for the boxed pair, see README.md


class ReDrafter(Engine):
    """A target with its recurrent drafter.

    engine = ReDrafter.from_pretrained("my-base", "my-drafter")
    ids = engine.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=100)
    """

    def __init__(self, target: Target, drafter: RecurrentDrafter, shape: TreeShape | None = None):
        """shape: what it leaves open comes from the drafter's config; the node budget, from the device."""
        config = drafter.config
        shape = (shape or TreeShape()).over(TreeShape(config.draft_beams, config.draft_len_per_beam))
        beams, depth = shape.num_beams, shape.draft_len_per_beam
        assert beams is not None and depth is not None
        check_beams(config, beams)
        if config.trained_draft_len is not None and depth > config.trained_draft_len:
            warnings.warn(
                f"draft_len_per_beam={depth} is more than the {config.trained_draft_len} steps that the drafter was "
                "trained for; the further ones will seldom be accepted",
                stacklevel=3,
            )
        lattice = 1 + beams * depth
        budget = shape.node_budget or (CPU_NODE_BUDGET if target.device.type == "cpu" else lattice)
        self.drafter = drafter
        super().__init__(target, RecurrentProposer(drafter, target, beams, depth, min(budget, lattice)))

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | PreTrainedModel,
        drafter: str | Path | RecurrentDrafter | None = None,
        *,
        num_beams: int | None = None,
        draft_len_per_beam: int | None = None,
        node_budget: int | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        trust_remote_code: bool = False,
        **model_kwargs: Any,
    ) -> "ReDrafter":
        """Load a target and its drafter; both may be a hub id, a directory or a loaded object.

        Without `drafter`, `model` is a merged checkpoint, such as `boxed_pair()`. num_beams, draft_len_per_beam: the
        beam search; from the checkpoint when None. node_budget: nodes verified per step, 1 + beams * length at most
        (which is the default on a GPU; a CPU verifies fewer). model_kwargs: for `AutoModelForCausalLM`.

        Raises `CheckpointError`, `MismatchError`, `UnsupportedError` or `ArgumentError`.
        """
        asked = TreeShape(num_beams, draft_len_per_beam, node_budget)
        loaded = load_model(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code, **model_kwargs)
        target = Target(loaded)
        drafter, shape = load_drafter(model, drafter, target, model_kwargs.get("revision"))
        return cls(target, drafter, asked.over(shape))
