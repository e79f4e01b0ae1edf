"""Apple's drafters (apple/ml-recurrent-drafter), which Hugging Face's loaders read too: names and config.

The final head and the residual layers before it are one list, `lm_head.0` to `lm_head.{L}`. Older checkpoints call that
list `lm_heads`, with `input_projs` beside it, or `0`. The embedding table is the base's and not stored.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redrafter.convert.tensors import Stored
from redrafter.drafting.drafter_config import DrafterConfig
from redrafter.errors import CheckpointError, UnsupportedError
from redrafter.files.checkpoint_kind import APPLE_MODEL_TYPE

__all__ = ["check", "check_form", "config_of", "ours", "their_config", "theirs"]

LISTS = ("lm_head", "lm_heads", "0")  # the list of residual layers and head, by generation
SIZES = ("vocab_size", "hidden_size", "exit_dim", "num_draft_layers", "rnn")
_THEIRS = {"model_type": APPLE_MODEL_TYPE, "architectures": ["Drafter"], "num_lookback_tokens": -1, "emb_norm": False}


def ours(name: str, layers: int) -> str:
    """This project's name of a tensor of theirs; what is no such name is returned as it is."""
    name = re.sub(r"^input_projs\.", "input_proj.", name)
    for each in LISTS:
        if match := re.fullmatch(rf"{each}\.(\d+)\.(linear\.)?(weight|bias)", name):
            number, linear, kind = match.groups()
            if linear:
                return f"layers.{number}.linear.{kind}"
            if int(number) == layers:
                return f"lm_head.{kind}"
    return name


def theirs(name: str, layers: int) -> str:
    """Their name, of the current generation, of a tensor of ours."""
    if name == "lm_head.weight":
        return f"lm_head.{layers}.weight"
    return re.sub(r"^layers\.(\d+)\.", r"lm_head.\1.", name)


def config_of(config: Mapping[str, Any], tensors: Mapping[str, Stored], place: Path) -> DrafterConfig:
    """Our config from theirs. What ours has no name for is kept under `source_config`, for the way back.

    tensors: theirs, which say what the config leaves open: the vocabulary and whether there is a recurrence.
    """
    missing = [key for key in ("hidden_size", "exit_dim", "num_draft_layers") if not _is_size(config, key)]
    if missing:
        raise CheckpointError(f"{place / 'config.json'} does not say {', '.join(missing)}")
    layers, vocabulary = config["num_draft_layers"], config.get("vocab_size", -1)
    head = next((x for name, x in tensors.items() if ours(name, layers) == "lm_head.weight"), None)
    if not isinstance(vocabulary, int) or vocabulary < 1:
        if head is None:
            raise CheckpointError(f"{place} has no tensor lm_head.{layers}.weight, which its config asks for")
        vocabulary = head.length
    return DrafterConfig(
        vocab_size=vocabulary,
        hidden_size=config["hidden_size"],
        exit_dim=config["exit_dim"],
        num_draft_layers=layers,
        rnn=config.get("rnn", "rnn_u.weight" in tensors),
        source_config={key: value for key, value in config.items() if key not in SIZES},
    )


def check(config: DrafterConfig) -> None:
    """Raise `UnsupportedError` naming what Apple's format has no place for."""
    check_form(config, "Apple's format", ("apple",))


def check_form(config: DrafterConfig, format: str, recurrences: Sequence[str]) -> None:
    """Raise `UnsupportedError` naming what a format for drafters of the published form has no place for."""
    lacking = {
        "recurrence": config.rnn and config.recurrence not in recurrences,
        "target_layers": bool(config.target_layers),
        "head_rank": config.head_rank is not None,
        "draft_vocab_size": config.draft_vocab_size is not None,
    }
    for name, lacks in lacking.items():
        if lacks:
            raise UnsupportedError(f"{format} cannot hold {name}={getattr(config, name)!r}")


def their_config(config: DrafterConfig, dtype: str) -> dict[str, Any]:
    """Their config from ours, with what `config_of` kept. dtype: of the tensors, such as float32."""
    kept = getattr(config, "source_config", None)
    found = dict(kept if isinstance(kept, dict) and kept else _THEIRS)
    for key in ("dtype", "torch_dtype"):
        if key in found:
            found[key] = dtype
    return found | {key: getattr(config, key) for key in SIZES}


def _is_size(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    return (
        isinstance(value, int) and not isinstance(value, bool) and value >= (key == "hidden_size" or key == "exit_dim")
    )
