"""Save a trained drafter with its model card and its record."""

import copy
import json
from pathlib import Path
from typing import Any

import torch

from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.drafting.drafter_config import DrafterConfig
from redrafter.files.atomic_folder import check_output_folder, write_folder

__all__ = ["check_output", "save_drafter"]

RECORD_FILE = "training.json"
FILES_BESIDE_WEIGHTS = {"README.md", "config.json", RECORD_FILE}  # what `save_drafter` writes beside the weights


def check_output(output: Path, overwrite: bool) -> None:
    """Raise `ArgumentError` if `save_drafter` could not write there, or would not replace what is there."""
    check_output_folder(output, overwrite, flag="--output", what="drafter", replaceable=_holds_drafter_or_its_files)


def save_drafter(
    drafter: RecurrentDrafter,
    output: Path,
    card: str,
    facts: dict[str, Any],
    dtype: torch.dtype,
    overwrite: bool = False,
) -> None:
    """Write a drafter with its model card and its record. Raises as `write_folder` and `check_output` do.

    Args:
        drafter: Trained drafter; it is copied before its dtype is changed.
        output: Folder to write.
        card: Text of README.md.
        facts: Content of training.json, as `provenance` makes it.
        dtype: Dtype of the saved weights.
        overwrite: Replace a drafter that is there already.
    """
    check_output(output, overwrite)
    saved: Any = copy.deepcopy(drafter).cpu()

    def fill(folder: Path) -> None:
        saved.to(dtype).save_pretrained(folder)
        (folder / "README.md").write_text(card, encoding="utf-8")
        (folder / RECORD_FILE).write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    write_folder(output, fill)


def _holds_drafter_or_its_files(folder: Path) -> bool:
    """Return whether a folder holds a drafter, or nothing but what `save_drafter` writes beside a drafter's weights."""
    if _read(folder / "config.json").get("model_type") == DrafterConfig.model_type:
        return True
    names = {file.name for file in folder.iterdir()}
    return names <= FILES_BESIDE_WEIGHTS and "saved_step" in _read(folder / RECORD_FILE)


def _read(file: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one where there is none."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
