"""A base model as the source of a conversion: Hugging Face's, or a TensorRT-LLM checkpoint of Llama or Qwen2."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from redrafter.checkpoints.drafters import NORM_ROWS, check_fits_base
from redrafter.checkpoints.headers import read_base
from redrafter.convert import trtllm, trtllm_base, trtllm_base_config
from redrafter.convert.tensors import LazyTensor, file_tensor
from redrafter.drafting.drafter_types import DrafterArchitecture
from redrafter.files.checkpoint_kind import SHAPE_FILE, kind_of
from redrafter.target.supported import config_width

__all__ = ["FLOAT_DTYPES", "TOKENIZER_FILES", "SourceBase", "open_base"]

FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Folders of a model directory that belong to the model: `save_pretrained` keeps further chat templates in this one.
MODEL_FOLDERS = ("additional_chat_templates",)
TOKENIZER_FILES = (  # and files that belong with a tokenizer
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


@dataclass(frozen=True)
class SourceBase:
    """A base model that was opened: its config and the headers of its weights.

    Attributes:
        directory: Where it is.
        kind: What the directory holds, as `kind_of` names it.
        config: Hugging Face's config; read back from TensorRT-LLM's for such a checkpoint, unless it is quantised.
        tensors: Tensors by Hugging Face's names; empty for a quantised TensorRT-LLM checkpoint.
        trtllm_config: `config.json` of a TensorRT-LLM checkpoint; None for a Hugging Face model.
        ranks: Tensors of each rank of a TensorRT-LLM checkpoint, without those of its drafter.
    """

    directory: Path
    kind: str
    config: PretrainedConfig
    tensors: dict[str, LazyTensor]
    trtllm_config: dict[str, Any] | None = None
    ranks: Sequence[dict[str, LazyTensor]] = ()

    def files(self) -> dict[str, Path]:
        """Return the files of a Hugging Face model's directory that belong to the model, by their relative names."""
        files = {}
        for entry in sorted(self.directory.iterdir()):
            if entry.is_file() and entry.name != SHAPE_FILE and not entry.name.startswith("."):
                files[entry.name] = entry
            elif entry.is_dir() and entry.name in MODEL_FOLDERS:
                files |= {
                    str(file.relative_to(self.directory)): file for file in sorted(entry.rglob("*")) if file.is_file()
                }
        return files

    def embedding_norms(self) -> dict[str, list[float]]:
        """Return the norms of a few rows of each tensor that has the shape of the embedding table.

        A drafter's config holds these norms of its base. Only the model's code knows which tensor is the table; the
        head is the one other tensor of its shape.
        """
        config = self.config.get_text_config(decoder=True)
        shape = (getattr(config, "vocab_size", 0), config_width(config) if hasattr(config, "hidden_size") else 0)
        tables = {name: x for name, x in self.tensors.items() if x.shape == shape and x.dtype in FLOAT_DTYPES}
        rows = torch.linspace(0, max(shape[0] - 1, 0), NORM_ROWS).long().tolist()
        return {name: [x.read(row, row + 1).float().norm().item() for row in rows] for name, x in tables.items()}

    def check_fits(self, drafter: DrafterArchitecture) -> None:
        """Raise `MismatchError`, with the values of both, if a drafter was made for another base."""
        config = self.config.get_text_config(decoder=True)
        hidden, vocabulary = (
            (config_width(config), config.vocab_size)
            if self.trtllm_config is None
            else (self.trtllm_config["hidden_size"], self.trtllm_config["vocab_size"])
        )
        check_fits_base(drafter, hidden, vocabulary, list(self.embedding_norms().values()), str(self.directory))

    @property
    def quantization_method(self) -> str | None:
        """Name of the quantization method, or None for an unquantised base."""
        if self.trtllm_config is not None:
            settings = self.trtllm_config.get("quantization") or {}
            return settings.get("quant_algo") or settings.get("kv_cache_quant_algo")
        config = getattr(self.config, "quantization_config", None)
        if config is None:
            return None
        return str((config if isinstance(config, dict) else config.to_dict()).get("quant_method"))


def open_base(directory: Path) -> SourceBase:
    """Read the config of a base model and the headers of its weights.

    Raises:
        CheckpointError: When files are missing, broken or not what the config asks for.
        UnsupportedError: When it is a TensorRT-LLM checkpoint of a model other than Llama and Qwen2.
    """
    kind = kind_of(directory)
    if not kind.startswith("TensorRT-LLM"):
        hf_config, headers = read_base(directory)
        tensors = {name: file_tensor(header.file, name, header.shape, header.dtype) for name, header in headers.items()}
        return SourceBase(directory, kind, hf_config, tensors)
    config = trtllm.read_config(directory)
    ranks = [
        {name: tensor for name, tensor in rank.items() if not name.startswith(trtllm.DRAFTER_PREFIX)}
        for rank in trtllm.open_ranks(directory, trtllm.tensor_parallel_size(config))
    ]
    base = SourceBase(directory, kind, PretrainedConfig(), {}, config, ranks)
    if base.quantization_method:
        return base
    tensors = trtllm_base.join_base(ranks, config, directory)
    hf_config = trtllm_base_config.to_hf_config(config, trtllm_base.LM_HEAD not in tensors, directory)
    trtllm_base.check_complete(hf_config, {name: tensor.shape for name, tensor in tensors.items()}, directory)
    return replace(base, config=hf_config, tensors=tensors)
