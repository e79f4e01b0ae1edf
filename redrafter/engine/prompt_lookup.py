"""PromptLookup: a Hugging Face model that drafts for itself, from its own text."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from redrafter.checkpoints.models import bind
from redrafter.drafting.prompt_lookup import PromptLookupProposer
from redrafter.engine.engine import Engine
from redrafter.engine.options import EngineOptions
from redrafter.target.target import Target

__all__ = ["PromptLookup"]


class PromptLookup(Engine):
    """A target that drafts for itself from its own text: no second model, and nothing gained but on text that repeats.

    engine = PromptLookup.from_pretrained("my-base", ngram=2, draft_len=4)
    """

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | PreTrainedModel | Target,
        *,
        ngram: int = 2,
        draft_len: int = 4,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        trust_remote_code: bool = False,
        options: EngineOptions | None = None,
        **model_kwargs: Any,
    ) -> "PromptLookup":
        """model: a hub id, a directory, or a model that is loaded or bound. ngram: tokens that must have stood together
        before, at most; draft_len: tokens drafted per step. options, model_kwargs: as `ReDrafter.from_pretrained` takes
        them.

        Raises `CheckpointError`, `UnsupportedError` or `ArgumentError`.
        """
        proposer = PromptLookupProposer(ngram, draft_len)
        load: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code, "caller": cls.from_pretrained}
        return cls(bind(model, device=device, **load, **model_kwargs), proposer, options)
