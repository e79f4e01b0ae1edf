"""Record of how a drafter was made, written beside its weights as training.json so that it can be made again."""

import hashlib
import math
import subprocess
from collections.abc import Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedModel

import redrafter
from redrafter.app.flags import short_name
from redrafter.data.windows import Windows
from redrafter.files.dtype_names import dtype_name
from redrafter.measure.report import hardware, versions
from redrafter.train.config import TrainConfig, shown_command
from redrafter.train.trainer import TrainingResult

__all__ = ["describe_files", "hash_windows", "make_provenance", "source_revision"]

READ_BYTES = 1 << 20  # read at once to hash a file


def make_provenance(
    model: PreTrainedModel,
    base: str,
    config: TrainConfig,
    result: TrainingResult,
    windows: Windows,
    accelerator: Accelerator,
) -> dict[str, Any]:
    """Make the content of training.json.

    Args:
        model: The base.
        base: Name of the base.
        config: Options of the training.
        result: What the training did.
        windows: Windows that were trained on.
        accelerator: Processes that trained together.
    """
    best = result.best_step
    return {
        "command": shown_command(config),
        "config": _config_without_folders(config),
        "versions": versions() | {"accelerate": version("accelerate")},
        "revision": source_revision(),
        "data": describe_files(config.data),
        "data_hash": hash_windows(windows),
        "windows": len(windows),
        "base": base,
        "base_dtype": dtype_name(model.dtype),
        "mixed_precision": accelerator.mixed_precision,
        "device": hardware(accelerator.device),
        "processes": accelerator.num_processes,
        "steps": result.steps,
        "saved_step": result.steps if best is None else best,
        "tokens": result.tokens,
        "seconds": round(result.seconds, 3),
        "tokens_per_second": round(result.tokens / result.seconds, 1) if result.seconds > 0 else None,
        "seconds_beside": {activity: round(seconds, 3) for activity, seconds in result.seconds_by_activity.items()},
        "loss": result.loss if math.isfinite(result.loss) else None,
        "accuracy": [part if math.isfinite(part) else None for part in result.accuracy],
        "tokens_per_step": {str(step): value for step, value in sorted(result.tokens_per_step.items())},
    }


def source_revision() -> str | None:
    """Return the commit of the checkout that this library runs from, with -dirty if it was changed; None elsewhere."""
    checkout = Path(redrafter.__file__).resolve().parents[1]
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def describe_files(sources: Sequence[str]) -> list[dict[str, Any]]:
    """Describe each source of texts: its name and, if it is a file, its size and sha256."""
    descriptions = []
    for source in sources:
        path = Path(source)
        description: dict[str, Any] = {"name": short_name(source), "bytes": None, "sha256": None}
        if path.is_file():
            description |= {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        descriptions.append(description)
    return descriptions


def hash_windows(windows: Windows) -> str:
    """Return the sha256 of the windows, which changes with the data, their order, the tokenizer and the template."""
    digest = hashlib.sha256()
    for part in (windows.tokens, windows.mask, windows.offsets):
        digest.update(part.contiguous().numpy().data)
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _config_without_folders(config: TrainConfig) -> dict[str, Any]:
    """Return a config as JSON, with the names of files without their folders."""
    options: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.metadata.get("path") or field.name == "model":
            value = tuple(map(short_name, value)) if isinstance(value, tuple) else value and short_name(value)
        options[field.name] = value
    return options
