"""Apple's drafters (apple/ml-recurrent-drafter), which Hugging Face's loaders read too: tensor names and config.

The residual layers and the head after them are one list, `lm_head.0` to `lm_head.{L}`. Older checkpoints call that list
`lm_heads`, with `input_projs` beside it, or `0`. The embedding table is the base's and is not stored.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redrafter.convert.tensors import LazyTensor
from redrafter.drafting.drafter_config import DrafterConfig
from redrafter.drafting.drafter_types import DrafterArchitecture
from redrafter.errors import CheckpointError, UnsupportedError
from redrafter.files.checkpoint_kind import APPLE_MODEL_TYPE

__all__ = [
    "UNUSED_NORM",
    "check_drafter",
    "check_published_form",
    "to_apple_config",
    "to_apple_name",
    "to_redrafter_config",
    "to_redrafter_name",
]

HEAD_LISTS = ("lm_head", "lm_heads", "0")  # names of the list of residual layers and head, newest first
UNUSED_NORM = "emb_norm.weight"  # in some checkpoints; nothing reads it, and it is kept for the way back
SIZE_KEYS = ("vocab_size", "hidden_size", "exit_dim", "num_draft_layers", "rnn")
_OTHER_KEYS = {
    "model_type": APPLE_MODEL_TYPE,
    "architectures": ["Drafter"],
    "num_lookback_tokens": -1,
    "emb_norm": False,
}


def to_redrafter_name(name: str, layers: int) -> str:
    """Return this project's name of a tensor in Apple's checkpoint; another name is returned unchanged.

    Args:
        name: Apple's name, of any generation.
        layers: Number of residual layers of the drafter.
    """
    name = re.sub(r"^input_projs\.", "input_proj.", name)
    for head_list in HEAD_LISTS:
        if match := re.fullmatch(rf"{head_list}\.(\d+)\.(linear\.)?(weight|bias)", name):
            number, linear, kind = match.groups()
            if linear:
                return f"layers.{number}.linear.{kind}"
            if int(number) == layers:
                return f"lm_head.{kind}"
    return name


def to_apple_name(name: str, layers: int) -> str:
    """Return Apple's current name of a tensor of this project's drafter with so many residual layers."""
    if name == "lm_head.weight":
        return f"lm_head.{layers}.weight"
    return re.sub(r"^layers\.(\d+)\.", r"lm_head.\1.", name)


def to_redrafter_config(config: Mapping[str, Any], tensors: Mapping[str, LazyTensor], directory: Path) -> DrafterConfig:
    """Convert Apple's config; keys without a counterpart are kept in `source_config`, for the way back.

    Args:
        config: Apple's config.
        tensors: Tensors by Apple's names. They tell the vocabulary and the recurrence if the config does not.
        directory: Where they are, for error messages.

    Raises:
        CheckpointError: When a size is missing.
    """
    missing = [key for key in ("hidden_size", "exit_dim", "num_draft_layers") if not _is_size(config, key)]
    if missing:
        raise CheckpointError(f"{directory / 'config.json'} does not say {', '.join(missing)}")
    layers, vocabulary = config["num_draft_layers"], config.get("vocab_size", -1)
    head = next((x for name, x in tensors.items() if to_redrafter_name(name, layers) == "lm_head.weight"), None)
    if not isinstance(vocabulary, int) or vocabulary < 1:
        if head is None:
            raise CheckpointError(f"{directory} has no tensor lm_head.{layers}.weight, which its config asks for")
        vocabulary = head.length
    return DrafterConfig(
        vocab_size=vocabulary,
        hidden_size=config["hidden_size"],
        exit_dim=config["exit_dim"],
        num_draft_layers=layers,
        rnn=config.get("rnn", "rnn_u.weight" in tensors),
        source_config={key: value for key, value in config.items() if key not in SIZE_KEYS},
    )


def check_drafter(config: DrafterArchitecture) -> DrafterConfig:
    """Return the config of a drafter; raise `UnsupportedError` with the name of what Apple's format cannot hold."""
    return check_published_form(config, "Apple's format", ("apple",))


def check_published_form(config: DrafterArchitecture, format_name: str, recurrences: Sequence[str]) -> DrafterConfig:
    """Return the config of a drafter; raise `UnsupportedError` unless it has the form of the paper.

    Args:
        config: The drafter.
        format_name: Name of the format, for the error message.
        recurrences: The recurrences that the format can hold.
    """
    keeping = "--to redrafter or --to drafter keeps it"
    if not isinstance(config, DrafterConfig):
        raise UnsupportedError(f"{format_name} cannot hold an EAGLE-3 head; {keeping}")
    extensions = {
        "recurrence": config.rnn and config.recurrence not in recurrences,
        "target_layers": bool(config.target_layers),
        "context_window": config.context_window is not None,
        "head_rank": config.head_rank is not None,
        "draft_vocab_size": config.draft_vocab_size is not None,
    }
    for name, present in extensions.items():
        if present:
            value = getattr(config, name)
            raise UnsupportedError(
                f"{format_name} cannot hold {name}={value!r}; {keeping}, and "
                "`redrafter train --recurrence apple` makes one of the published form"
            )
    return config


def to_apple_config(config: DrafterConfig, dtype: str) -> dict[str, Any]:
    """Convert a config to Apple's, with the keys that `to_redrafter_config` kept.

    Args:
        config: The drafter.
        dtype: Number format of its tensors, such as "float32".
    """
    kept = getattr(config, "source_config", None)
    apple_config = dict(kept if isinstance(kept, dict) and kept else _OTHER_KEYS)
    for key in ("dtype", "torch_dtype"):
        if key in apple_config:
            apple_config[key] = dtype
    return apple_config | {key: getattr(config, key) for key in SIZE_KEYS}


def _is_size(config: Mapping[str, Any], key: str) -> bool:
    """Return whether a config has an integer that can be the size `key`; only the number of layers may be 0."""
    value = config.get(key)
    return isinstance(value, int) and not isinstance(value, bool) and value >= (key in ("hidden_size", "exit_dim"))
