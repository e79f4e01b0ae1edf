"""A trained drafter's directory: written whole, or not at all."""

import copy
import json
import shutil
from pathlib import Path

import torch

from redrafter.drafter import DrafterConfig, RecurrentDrafter
from redrafter.errors import ArgumentError

__all__ = ["check_output", "save"]


def check_output(output: Path, overwrite: bool) -> None:
    """Raise `ArgumentError` when `save` would refuse to write there."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not overwrite:
        raise ArgumentError(f"--output {output} is there already and not empty; name another, or pass --overwrite")
    if not _holds_drafter(output):
        raise ArgumentError(f"--output {output} holds something that is no drafter, which is never overwritten")


def save(drafter: RecurrentDrafter, output: Path, card: str, dtype: torch.dtype, overwrite: bool = False) -> None:
    """Write the drafter in `dtype` and its card under another name first, and then rename."""
    check_output(output, overwrite)
    output = output.absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    partial, old = (output.with_name(f".{output.name}.{what}") for what in ("partial", "old"))
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        saved = copy.deepcopy(drafter).cpu().to(dtype)  # type: ignore[arg-type]
        saved.save_pretrained(partial)
        (partial / "README.md").write_text(card, encoding="utf-8")
        if output.exists():
            output.rename(old)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _holds_drafter(folder: Path) -> bool:
    try:
        return json.loads((folder / "config.json").read_text())["model_type"] == DrafterConfig.model_type
    except (OSError, ValueError, KeyError, TypeError):
        return False
