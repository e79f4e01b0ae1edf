"""A base in either of the forms that it may come in: Hugging Face's, or a TensorRT-LLM checkpoint of Llama or Qwen2."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from redrafter.checkpoint import NORM_ROWS, SHAPE_FILE, embedding_norms
from redrafter.convert import trtllm, trtllm_base
from redrafter.convert.tensors import Stored, of_file
from redrafter.drafter import DrafterConfig
from redrafter.errors import MismatchError
from redrafter.headers import check_pair, kind_of, read_base, read_json

__all__ = ["Base", "read"]

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

    def norms(self) -> list[float] | None:
        """Of a few rows of its embedding table, by which a drafter knows it; None where that table is not found."""
        table = self.tensors.get("model.embed_tokens.weight")
        if table is None:
            return None
        picked = torch.linspace(0, table.length - 1, NORM_ROWS).long().tolist()
        rows = torch.cat([table.read(row, row + 1) for row in picked])
        return embedding_norms(torch.nn.Embedding.from_pretrained(rows.float()))

    def check(self, drafter: DrafterConfig) -> None:
        """Raise `MismatchError`, with both values, when a drafter was made for another base."""
        if self.said is None:
            check_pair(drafter, self.config, read_base(self.place)[1], str(self.place))
            return
        for name in ("hidden_size", "vocab_size"):
            if self.said.get(name) != getattr(drafter, name):
                raise MismatchError(
                    f"the drafter was made for {name} {getattr(drafter, name)}, but {self.place} has "
                    f"{self.said.get(name)}; its base is {drafter.base_model or 'not recorded'}"
                )


def read(place: Path) -> Base:
    """The base in a directory. Nothing but headers is read."""
    kind = kind_of(place)
    if not kind.startswith("TensorRT-LLM"):
        config, headers = read_base(place)
        tensors = {name: of_file(each.file, name, each.shape, each.dtype) for name, each in headers.items()}
        return Base(place, kind, config, tensors)
    said = read_json(place / "config.json")
    ranks = trtllm.read_ranks(place, trtllm.tp_of(said, place))
    own = [{name: x for name, x in rank.items() if not name.startswith(trtllm.PREFIX)} for rank in ranks]
    if (said.get("quantization") or {}).get("quant_algo"):
        return Base(place, kind, PretrainedConfig(), {}, said, own)
    tensors = trtllm_base.whole_base(own, said, place)
    config = trtllm_base.hf_config(said, trtllm_base.HEAD not in tensors, place)
    return Base(place, kind, config, tensors, said, own)
