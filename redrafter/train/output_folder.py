"""The folder that a training writes, checked before anything is loaded. This module imports no torch."""

import json
from pathlib import Path
from typing import Any

from redrafter.errors import ArgumentError
from redrafter.files.atomic_folder import check_output_folder
from redrafter.files.drafter_kinds import drafter_kinds

RECORD_FILE = "training.json"
FILES_BESIDE_WEIGHTS = {"README.md", "config.json", RECORD_FILE}  # what `save_drafter` writes beside the weights


def check_output(output: Path, overwrite: bool) -> None:
    """Raise `ArgumentError` if `save_drafter` could not write there, or would not replace what is there."""
    check_output_folder(output, overwrite, flag="--output", what="drafter", replaceable=_holds_drafter_or_its_files)


def checkpoints_folder(output: Path) -> Path:
    """Return the folder of the checkpoints of a training that writes `output`."""
    return output.with_name(output.name + ".checkpoints")


def check_no_checkpoints(output: Path) -> None:
    """Raise `ArgumentError` where an earlier training has left checkpoints, and neither it nor a new one is asked for.

    This is for a training without `--resume` and `--overwrite`.
    """
    if (folder := checkpoints_folder(output)).exists():
        raise ArgumentError(
            f"{folder} holds an earlier training's checkpoints; go on with --resume, or begin anew with --overwrite"
        )


def _holds_drafter_or_its_files(folder: Path) -> bool:
    """Return whether a folder holds a drafter, or nothing but what `save_drafter` writes beside a drafter's weights."""
    if str(_read(folder / "config.json").get("model_type")) in drafter_kinds():
        return True
    names = {file.name for file in folder.iterdir()}
    return names <= FILES_BESIDE_WEIGHTS and "saved_step" in _read(folder / RECORD_FILE)


def _read(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
