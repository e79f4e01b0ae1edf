"""A base in either of the forms that it may come in: Hugging Face's, or a TensorRT-LLM checkpoint of Llama or Qwen2."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from redrafter.checkpoints.drafters import NORM_ROWS, check_fits_base
from redrafter.checkpoints.headers import read_base
from redrafter.convert import trtllm, trtllm_base
from redrafter.convert.tensors import Stored, of_file
from redrafter.drafting.drafter_config import DrafterConfig
from redrafter.files.checkpoint_kind import SHAPE_FILE, kind_of
from redrafter.target.supported import config_width

__all__ = ["Base", "read"]

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# The one folder of a model directory that belongs to the model: `save_pretrained` keeps further chat templates there.
FOLDERS = ("additional_chat_templates",)
# Files of a tokenizer, and what goes with it.
TOKENIZER = (
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
class Base:
    """place, kind: the directory and what it is. said: config.json of a TensorRT-LLM checkpoint, and ranks: its tensors
    by rank. config, tensors: of a Hugging Face model."""

    place: Path
    kind: str
    config: PretrainedConfig
    tensors: dict[str, Stored]
    said: dict[str, Any] | None = None
    ranks: Sequence[dict[str, Stored]] = ()

    def files(self) -> dict[str, Path]:
        """Those of a Hugging Face model's directory that belong to the model."""
        found = {}
        for entry in sorted(self.place.iterdir()):
            if entry.is_file() and entry.name != SHAPE_FILE and not entry.name.startswith("."):
                found[entry.name] = entry
            elif entry.is_dir() and entry.name in FOLDERS:
                found |= {
                    str(file.relative_to(self.place)): file for file in sorted(entry.rglob("*")) if file.is_file()
                }
        return found

    def norms(self) -> dict[str, list[float]]:
        """Of a few rows of each table that may be its embedding, by which a drafter knows it. Which table that is only
        the model's code knows; the head is the one other of its shape."""
        config = self.config.get_text_config(decoder=True)
        shape = (getattr(config, "vocab_size", 0), config_width(config) if hasattr(config, "hidden_size") else 0)
        tables = {name: x for name, x in self.tensors.items() if x.shape == shape and x.dtype in FLOATS}
        picked = torch.linspace(0, max(shape[0] - 1, 0), NORM_ROWS).long().tolist()
        return {name: [x.read(row, row + 1).float().norm().item() for row in picked] for name, x in tables.items()}

    def check(self, drafter: DrafterConfig) -> None:
        """Raise `MismatchError`, with both values, when a drafter was made for another base."""
        config = self.config.get_text_config(decoder=True)
        hidden, vocabulary = (
            (config_width(config), config.vocab_size)
            if self.said is None
            else (self.said["hidden_size"], self.said["vocab_size"])
        )
        check_fits_base(drafter, hidden, vocabulary, list(self.norms().values()), str(self.place))

    @property
    def quantised(self) -> str | None:
        """By what, if it is."""
        if self.said is not None:
            said = self.said.get("quantization") or {}
            return said.get("quant_algo") or said.get("kv_cache_quant_algo")
        own = getattr(self.config, "quantization_config", None)
        own = own if isinstance(own, dict) or own is None else own.to_dict()
        return None if own is None else str(own.get("quant_method"))


def read(place: Path) -> Base:
    """The base in a directory, from its headers."""
    kind = kind_of(place)
    if not kind.startswith("TensorRT-LLM"):
        config, headers = read_base(place)
        tensors = {name: of_file(each.file, name, each.shape, each.dtype) for name, each in headers.items()}
        return Base(place, kind, config, tensors)
    said = trtllm.read_config(place)
    ranks = trtllm.read_ranks(place, trtllm.tp_of(said))
    own = [{name: x for name, x in rank.items() if not name.startswith(trtllm.PREFIX)} for rank in ranks]
    found = Base(place, kind, PretrainedConfig(), {}, said, own)
    if found.quantised:
        return found
    tensors = trtllm_base.whole_base(own, said, place)
    config = trtllm_base.hf_config(said, trtllm_base.HEAD not in tensors, place)
    trtllm_base.check_whole(config, {name: x.shape for name, x in tensors.items()}, place)
    return replace(found, config=config, tensors=tensors)
