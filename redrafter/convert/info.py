"""`redrafter info`: say what a checkpoint is."""

import json
import math
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import torch
import transformers

from redrafter.app.parser import Parser, add_json
from redrafter.app.program import run_command
from redrafter.checkpoints.merged import boxed_pair
from redrafter.convert import base as bases
from redrafter.convert import drafters
from redrafter.convert.base import Base
from redrafter.convert.drafters import Drafter
from redrafter.convert.targets import ConversionRequest, Source, possible
from redrafter.convert.tensors import Stored
from redrafter.errors import ArgumentError, CheckpointError, MismatchError, first_line
from redrafter.files.checkpoint_kind import check_path, kind_of
from redrafter.files.dtype_names import dtype_name
from redrafter.version import __version__

__all__ = ["describe", "main"]


def describe(name: str, drafter_name: str | None = None) -> dict[str, Any]:
    """Facts about a directory, or about a model and a drafter for it; `CheckpointError` when files are broken."""
    directory = _locate(name)
    kind = kind_of(directory)
    found: dict[str, Any] = {"path": str(directory), "kind": kind}
    if kind in ("drafter", "Apple drafter"):
        if drafter_name is not None:
            raise ArgumentError(f"{name} is a drafter itself: give the model first, and the drafter with --drafter")
        drafter = drafters.read(directory)
        return found | {"drafter": _drafter(drafter), "converts_to": possible(Source(drafter))}
    base = bases.read(directory)
    found["model"] = _model(base)
    place = _locate(drafter_name) if drafter_name is not None else directory if _is_pair(kind) else None
    if place is None:
        return found
    drafter = drafters.read(place)
    found["drafter"] = {"path": str(drafter.place)} | _drafter(drafter)
    found["drafter"]["share_of_model"] = round(_count(drafter.tensors) / max(found["model"]["parameters"] or 1, 1), 4)
    if _is_pair(drafter.kind):
        said = ConversionRequest().over(drafter)
        found["shape"] = asdict(said.shape) | {"greedy_search": said.greedy_search}
    try:
        base.check(drafter.config)
        found["fits"] = True
    except MismatchError as error:
        return found | {"fits": False, "why_not": str(error)}
    return found | {"converts_to": possible(Source(drafter, base))}


def _is_pair(kind: str) -> bool:
    return kind in ("merged checkpoint", "TensorRT-LLM ReDrafter checkpoint")


def _locate(name: str) -> Path:
    """A directory, or what a hub id was downloaded to; nothing is downloaded."""
    if Path(name).is_dir():
        return Path(name)
    check_path(name)
    try:
        return Path(huggingface_hub.snapshot_download(name, local_files_only=True))
    except Exception as error:
        raise CheckpointError(f"{name} is no directory, and not in the download cache: {first_line(error)}") from error


def _model(base: Base) -> dict[str, Any]:
    config: Any = base.config.get_text_config(decoder=True) if base.said is None else SimpleNamespace(**base.said)
    names = getattr(config, "architectures", None) or base.config.architectures
    if base.said is not None:
        names = [base.said.get("base_model_architecture", base.said["architecture"])]
    tensors = base.tensors or {f"{n} {name}": x for n, rank in enumerate(base.ranks) for name, x in rank.items()}
    found = {
        "architecture": ", ".join(names) if isinstance(names, list) else config.model_type,
        "parameters": _count(tensors),
        "stored_as": _formats(tensors),
        "hidden_size": getattr(config, "hidden_size", None),
        "layers": getattr(config, "num_hidden_layers", None),
        "vocabulary": getattr(config, "vocab_size", None),
        "context": getattr(config, "max_position_embeddings", None),
    }
    if base.said is not None:
        found["ranks"] = len(base.ranks)
    if base.quantised is not None:
        found["quantised"] = base.quantised
    return found


def _drafter(drafter: Drafter) -> dict[str, Any]:
    config = drafter.config
    return {
        "parameters": _count(drafter.tensors),
        "stored_as": _formats(drafter.tensors),
        "hidden_size": config.hidden_size,
        "exit_dim": config.exit_dim,
        "layers": config.num_draft_layers,
        "recurrence": config.recurrence if config.rnn else "none: a running sum of embeddings",
        "target_layers": config.target_layers or None,
        "head_rank": config.head_rank,
        "vocabulary": config.vocab_size,
        "draft_vocabulary": config.draft_vocab_size or config.vocab_size,
        "num_beams": config.draft_beams,
        "draft_len_per_beam": config.draft_len_per_beam,
        "trained_draft_len": config.trained_draft_len,
        "base_model": config.base_model,
    }


def _count(tensors: Mapping[str, Stored]) -> int:
    """Stored numbers, id maps not counted."""
    return sum(math.prod(tensor.shape) for tensor in tensors.values() if tensor.dtype != torch.int64)


def _formats(tensors: Mapping[str, Stored]) -> str:
    """The number formats of the parameters, such as `bfloat16`."""
    stored = {tensor.dtype for tensor in tensors.values()} - {torch.int64}
    return ", ".join(sorted(dtype_name(dtype) for dtype in stored))


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


def _parser() -> Parser:
    parser = Parser(
        prog="redrafter info",
        description="Say what a model, a drafter or a pair is, whether they fit, and what can be converted to what.\n"
        "Knows Hugging Face's models, merged checkpoints, this project's drafters, Apple's, and TensorRT-LLM's\n"
        "checkpoints. Reads configs and the headers of the weights. Without MODEL: the boxed pair and the versions.",
        epilog="example:\n  redrafter info my-base --drafter my-drafter",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="directory, or hub id that was downloaded before")
    parser.add_argument("--drafter", metavar="D", help="a drafter for MODEL")
    add_json(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns its exit code."""

    def run() -> int:
        args = _parser().parse_args(argv)
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

    return run_command(run)


if __name__ == "__main__":
    sys.exit(main())
