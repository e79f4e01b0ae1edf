"""Apple's drafters (apple/ml-recurrent-drafter), which Hugging Face's loaders read too: tensor names and config.

The residual layers and the head after them are one list, `lm_head.0` to `lm_head.{L}`. Older checkpoints call that list
`lm_heads`, together with `input_projs`, or `0`. The embedding table is the base's and is not stored.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redrafter.drafting.drafter_config import AnyDrafterConfig, DrafterConfig
from redrafter.errors import CheckpointError, UnsupportedError
from redrafter.files.checkpoint_kind import APPLE_MODEL_TYPE
from redrafter.formats.tensors import StoredTensor, Tensors

HEAD_LISTS = ("lm_head", "lm_heads", "0")  # names of the list of residual layers and head, newest first
UNUSED_NORM = "emb_norm.weight"  # in some checkpoints; nothing reads it, and it is kept for the way back
SIZE_KEYS = ("vocab_size", "hidden_size", "exit_dim", "num_draft_layers", "rnn")
_OTHER_KEYS = {
    "model_type": APPLE_MODEL_TYPE,
    "architectures": ["Drafter"],
    "num_lookback_tokens": -1,
    "emb_norm": False,
}


def rename_tensors(stored: Tensors, config: DrafterConfig, directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a drafter by this project's names."""
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        if (new_name := _to_redrafter_name(name, config.num_draft_layers)) in tensors:
            raise CheckpointError(f"{directory} has {tensors[new_name].name} and {name}, names of one tensor")
        tensors[new_name] = tensor
    return tensors


def _to_redrafter_name(name: str, layers: int) -> str:
    # Apple numbers the residual layers and the head as entries of one list.
    entry = re.fullmatch(rf"({'|'.join(HEAD_LISTS)})\.(\d+)\.(linear\.)?(weight|bias)", name)
    if entry is None or not (entry[3] or int(entry[2]) == layers):
        return re.sub(r"^input_projs\.", "input_proj.", name)
    return f"layers.{entry[2]}.linear.{entry[4]}" if entry[3] else f"lm_head.{entry[4]}"


def to_apple_name(name: str, layers: int) -> str:
    """Return Apple's current name of a tensor of this project's drafter with `layers` residual layers."""
    return re.sub(r"^layers\.", "lm_head.", re.sub(r"^lm_head\.", f"lm_head.{layers}.", name))


def to_redrafter_config(config: Mapping[str, Any], tensors: Tensors, directory: Path) -> DrafterConfig:
    """Convert Apple's config; keys without a counterpart are kept in `source_config`, for the way back.

    The tensors, by Apple's names, determine the vocabulary and the recurrence if the config does not.
    """
    # Only the number of layers may be 0.
    least = {"hidden_size": 1, "exit_dim": 1, "num_draft_layers": 0}
    if missing := [key for key, size in least.items() if type(config.get(key)) is not int or config[key] < size]:
        raise CheckpointError(f"{directory / 'config.json'} does not say {', '.join(missing)}")
    layers, vocabulary = config["num_draft_layers"], config.get("vocab_size", -1)
    # The config may lack the vocabulary's size, which the head's shape gives.
    head = next((x for name, x in tensors.items() if _to_redrafter_name(name, layers) == "lm_head.weight"), None)
    if not isinstance(vocabulary, int) or vocabulary < 1:
        if head is None:
            raise CheckpointError(f"{directory} has no tensor lm_head.{layers}.weight, which its config asks for")
        vocabulary = head.shape[0]
    return DrafterConfig(
        vocab_size=vocabulary,
        hidden_size=config["hidden_size"],
        exit_dim=config["exit_dim"],
        num_draft_layers=layers,
        rnn=config.get("rnn", "rnn_u.weight" in tensors),
        source_config={key: value for key, value in config.items() if key not in SIZE_KEYS},
    )


def check_published_form(config: AnyDrafterConfig, format_name: str, recurrences: Sequence[str]) -> DrafterConfig:
    """Return the config of a drafter; raise `UnsupportedError` unless it has the form of the paper.

    The format can hold the `recurrences`. The error names the field that it cannot hold.
    """
    keeping = "--to redrafter or --to drafter keeps it"
    if not isinstance(config, DrafterConfig):
        raise UnsupportedError(f"{format_name} cannot hold {config.kind}s; {keeping}")
    for name in ("recurrence", "target_layers", "context_window", "head_rank", "draft_vocab_size"):
        value = getattr(config, name)
        if (config.rnn and value not in recurrences) if name == "recurrence" else value not in (None, (), []):
            raise UnsupportedError(
                f"{format_name} cannot hold {name}={value!r}; {keeping}, and "
                "`redrafter train --recurrence apple` makes one of the published form"
            )
    return config


def to_apple_config(config: DrafterConfig, dtype: str) -> dict[str, Any]:
    """Convert a config to Apple's, with the keys that `to_redrafter_config` kept."""
    apple_config = dict(config.source_config or _OTHER_KEYS)
    for key in ("dtype", "torch_dtype"):
        if key in apple_config:
            apple_config[key] = dtype
    return apple_config | {key: getattr(config, key) for key in SIZE_KEYS}
