"""`redrafter info`: say what a checkpoint is."""

import argparse
import json
import platform
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from transformers import PretrainedConfig

from redrafter.checkpoint import DRAFTER_FOLDER, SHAPE_FILE, TreeShape, boxed_pair
from redrafter.cli.loading import check_directory
from redrafter.drafter import DrafterConfig
from redrafter.errors import ArgumentError, CheckpointError, MismatchError, first_line
from redrafter.headers import Header, check_pair, dtypes, kind_of, parameters, read_base, read_drafter
from redrafter.version import __version__

__all__ = ["describe", "run"]


def run(args: argparse.Namespace) -> int:
    """Print what is known, as text or as one JSON document."""
    if args.model is not None:
        found = describe(args.model, args.drafter)
    elif args.drafter is not None:
        raise ArgumentError("--drafter needs the model that it should fit: redrafter info MODEL --drafter D")
    else:
        boxed = boxed_pair()
        found = describe(str(boxed)) if boxed.is_dir() else {"boxed_pair": "not in this installation"}
        found |= {"environment": _environment()}
    print(json.dumps(found) if args.json else "\n".join(_lines(found)))
    return 0


def describe(name: str, drafter_name: str | None = None) -> dict[str, Any]:
    """Facts about a directory, or about a model and a drafter for it; `CheckpointError` when files are broken."""
    directory = _locate(name)
    kind = kind_of(directory)
    found: dict[str, Any] = {"path": str(directory), "kind": kind}
    if kind == "drafter":
        if drafter_name is not None:
            raise ArgumentError(f"{name} is a drafter itself: give the model first, and the drafter with --drafter")
        return found | {"drafter": _drafter(*read_drafter(directory))}
    base, headers = read_base(directory)
    found["model"] = _model(base, headers)
    place = directory / DRAFTER_FOLDER if kind == "merged checkpoint" else None
    if drafter_name is not None:
        place = _locate(drafter_name)
    if place is None:
        return found
    drafter, drafter_headers = read_drafter(place)
    found["drafter"] = {"path": str(place)} | _drafter(drafter, drafter_headers)
    found["drafter"]["share_of_model"] = round(parameters(drafter_headers) / max(parameters(headers), 1), 4)
    if kind == "merged checkpoint":
        asked = TreeShape.read(directory / SHAPE_FILE)
        found["shape"] = asdict(asked.over(TreeShape(drafter.draft_beams, drafter.draft_len_per_beam)))
    try:
        check_pair(drafter, base, headers, name)
        found["fits"] = True
    except MismatchError as error:
        found |= {"fits": False, "why_not": str(error)}
    return found


def _locate(name: str) -> Path:
    """A directory, or what a hub id was downloaded to; nothing is downloaded."""
    if Path(name).is_dir():
        return Path(name)
    check_directory(name)
    try:
        return Path(huggingface_hub.snapshot_download(name, local_files_only=True))
    except Exception as error:
        raise CheckpointError(f"{name} is no directory, and not in the download cache: {first_line(error)}") from error


def _model(config: PretrainedConfig, headers: dict[str, Header]) -> dict[str, Any]:
    text = config.get_text_config(decoder=True)
    return {
        "architecture": ", ".join(config.architectures or [config.model_type]),
        "parameters": parameters(headers),
        "stored_as": dtypes(headers),
        "hidden_size": text.hidden_size,
        "layers": text.num_hidden_layers,
        "vocabulary": text.vocab_size,
        "context": getattr(text, "max_position_embeddings", None),
    }


def _drafter(config: DrafterConfig, headers: dict[str, Header]) -> dict[str, Any]:
    return {
        "parameters": parameters(headers),
        "stored_as": dtypes(headers),
        "hidden_size": config.hidden_size,
        "exit_dim": config.exit_dim,
        "layers": config.num_draft_layers,
        "recurrence": config.recurrence if config.rnn else "none: a running sum of embeddings",
        "vocabulary": config.vocab_size,
        "draft_vocabulary": config.draft_vocab_size or config.vocab_size,
        "num_beams": config.draft_beams,
        "draft_len_per_beam": config.draft_len_per_beam,
        "trained_draft_len": config.trained_draft_len,
        "base_model": config.base_model,
    }


def _environment() -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    return {
        "redrafter": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "devices": ["cpu"]
        + ([f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())] if cuda else []),
        "threads": torch.get_num_threads(),
    }


def _lines(found: dict[str, Any], indent: str = "") -> Iterator[str]:
    for key, value in found.items():
        name = indent + key.replace("_", " ")
        if isinstance(value, dict):
            yield name
            yield from _lines(value, indent + "  ")
        else:
            yield f"{name:<24}{_shown(value)}"


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
