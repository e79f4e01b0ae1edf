"""Where a drafter comes from: what is written beside its weights, so that it can be made again."""

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
from redrafter.measure.facts import hardware, versions
from redrafter.train.config import TrainConfig, shown_command
from redrafter.train.loop import Report

__all__ = ["data_hash", "files", "provenance", "revision"]

BLOCK = 1 << 20


def provenance(
    model: PreTrainedModel,
    base: str,
    config: TrainConfig,
    report: Report,
    windows: Windows,
    accelerator: Accelerator,
) -> dict[str, Any]:
    """Everything that is known of a training, as JSON. base: its name."""
    best = report.best_step
    return {
        "command": shown_command(config),
        "config": _plain(config),
        "versions": versions() | {"accelerate": version("accelerate")},
        "revision": revision(),
        "data": files(config.data),
        "data_hash": data_hash(windows),
        "windows": len(windows),
        "base": base,
        "base_dtype": dtype_name(model.dtype),
        "mixed_precision": accelerator.mixed_precision,
        "device": hardware(accelerator.device),
        "processes": accelerator.num_processes,
        "steps": report.steps,
        "saved_step": report.steps if best is None else best,
        "tokens": report.tokens,
        "seconds": round(report.seconds, 3),
        "tokens_per_second": round(report.tokens / report.seconds, 1) if report.seconds > 0 else None,
        "seconds_beside": {what: round(took, 3) for what, took in report.spent.items()},
        "loss": report.loss if math.isfinite(report.loss) else None,
        "accuracy": [part if math.isfinite(part) else None for part in report.accuracy],
        "tokens_per_step": {str(step): value for step, value in sorted(report.walked.items())},
    }


def revision() -> str | None:
    """The commit of the checkout that this library runs from, with -dirty where it was changed; None elsewhere."""
    checkout = Path(redrafter.__file__).resolve().parents[1]
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def files(sources: Sequence[str]) -> list[dict[str, Any]]:
    """Of each source of texts its name and, where it is a file, its size and sha256."""
    found = []
    for source in sources:
        path = Path(source)
        told: dict[str, Any] = {"name": short_name(source), "bytes": None, "sha256": None}
        if path.is_file():
            told |= {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        found.append(told)
    return found


def data_hash(windows: Windows) -> str:
    """sha256 of what is learnt from: it changes with the data, their order, the tokenizer and the template."""
    digest = hashlib.sha256()
    for part in (windows.tokens, windows.mask, windows.offsets):
        digest.update(part.contiguous().numpy().data)
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _plain(config: TrainConfig) -> dict[str, Any]:
    """A config as JSON, files without their folders."""
    found: dict[str, Any] = {}
    for each in fields(config):
        value = getattr(config, each.name)
        if each.metadata.get("path") or each.name == "model":
            value = tuple(map(short_name, value)) if isinstance(value, tuple) else value and short_name(value)
        found[each.name] = value
    return found
