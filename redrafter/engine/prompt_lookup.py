"""PromptLookup: a Hugging Face model whose own text drafts for it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from redrafter.checkpoints.models import bind
from redrafter.drafting.prompt_lookup import PromptLookupProposer
from redrafter.engine.engine import Engine
from redrafter.engine.options import EngineOptions
from redrafter.target.target import Target


class PromptLookup(Engine):
    """A target that drafts for itself from its own text: no second model, and no gain but on text that repeats.

    Example:
        ```python
        engine = PromptLookup.from_pretrained("my-base", ngram=2, draft_len=4)
        ids = engine.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=100)
        ```
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
        tp_size: int = 1,
        trust_remote_code: bool = False,
        quantization: str | None = None,
        kv_cache_free_gpu_memory_fraction: float = EngineOptions.kv_cache_free_gpu_memory_fraction,
        max_input_len: int | None = EngineOptions.max_input_len,
        max_seq_len: int | None = EngineOptions.max_seq_len,
        max_batch_size: int = EngineOptions.max_batch_size,
        compile: bool = EngineOptions.compile,
        batch_invariant: bool = EngineOptions.batch_invariant,
        adapters: Mapping[str, str | Path] | None = None,
        max_loras: int = EngineOptions.max_loras,
        max_lora_rank: int = EngineOptions.max_lora_rank,
        kv_host_cache_gib: float = EngineOptions.kv_host_cache_gib,
        kv_cache_dtype: str = EngineOptions.kv_cache_dtype,
        **model_kwargs: Any,
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
            kv_cache_free_gpu_memory_fraction: See `EngineOptions`.
            max_input_len: See `EngineOptions`.
            max_seq_len: See `EngineOptions`.
            max_batch_size: See `EngineOptions`.
            compile: See `EngineOptions`.
            batch_invariant: See `EngineOptions`.
            adapters: LoRA adapters to load: names, and the directories that PEFT's `save_pretrained` wrote.
            max_loras: See `EngineOptions`.
            max_lora_rank: See `EngineOptions`.
            kv_host_cache_gib: See `EngineOptions`.
            kv_cache_dtype: See `EngineOptions`.
            model_kwargs: For `AutoModelForCausalLM`.

        Raises:
            CheckpointError: When the model cannot be loaded.
            UnsupportedError: When the model cannot be decoded here.
            ArgumentError: For an argument that is unknown or out of range.
        """
        options = EngineOptions(
            kv_cache_free_gpu_memory_fraction,
            max_input_len,
            max_seq_len,
            max_batch_size,
            compile,
            batch_invariant,
            max_loras,
            max_lora_rank,
            kv_host_cache_gib,
            kv_cache_dtype,
        )
        proposer = PromptLookupProposer(ngram, draft_len)
        load: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code, "caller": cls.from_pretrained}
        engine = cls(
            bind(model, device=device, quantization=quantization, tp_size=tp_size, **load, **model_kwargs),
            proposer,
            options,
        )
        engine.load_adapters(adapters)
        return engine
