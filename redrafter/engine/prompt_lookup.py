"""PromptLookup: a Hugging Face model whose own text drafts for it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from redrafter.checkpoints.models import bind
from redrafter.drafting.prompt_lookup import PromptLookupProposer
from redrafter.engine.engine import Engine
from redrafter.engine.options import EngineOptions, takes_engine_options
from redrafter.model.target import Target


class PromptLookup(Engine):
    """A target that drafts for itself from its own text: no second model, and no gain but on text that repeats.

    Example:
        ```python
        engine = PromptLookup.from_pretrained("my-base", ngram=2, draft_len=4)
        ids = engine.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=100)
        ```
    """

    @classmethod
    @takes_engine_options
    def from_pretrained(
        cls,
        model: str | Path | PreTrainedModel | Target,
        *,
        ngram: int = 2,
        draft_len: int = 4,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        tp_size: int = 1,
        trust_remote_code: bool = False,
        quantization: str | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        **keywords: Any,
    ) -> "PromptLookup":
        """Load a target.

        Args:
            model: A hub id, a directory, or a model that is loaded or bound.
            ngram: Last tokens of the text that are looked for earlier in it, at most.
            draft_len: Tokens drafted per step.
            dtype: As in `ReDrafter.from_pretrained`.
            device: As in `ReDrafter.from_pretrained`.
            tp_size: As in `ReDrafter.from_pretrained`.
            trust_remote_code: As in `ReDrafter.from_pretrained`.
            quantization: As in `ReDrafter.from_pretrained`.
            adapters: LoRA adapters to load: names, and the directories that PEFT's `save_pretrained` wrote.
            keywords: Fields of `EngineOptions`; all others are for `AutoModelForCausalLM`.

        Raises:
            CheckpointError: When the model cannot be loaded.
            UnsupportedError: When the model cannot be decoded here.
            ArgumentError: For an argument that is unknown or out of range.
        """
        options, model_kwargs = EngineOptions.split(keywords)
        proposer = PromptLookupProposer(ngram, draft_len)
        load: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code, "caller": cls.from_pretrained}
        engine = cls(
            bind(model, device=device, quantization=quantization, tp_size=tp_size, **load, **model_kwargs),
            proposer,
            options,
        )
        engine.load_adapters(adapters)
        return engine
