"""Check the output folder of a training before anything is loaded; this module does not import torch."""

from pathlib import Path

from redrafter.errors import ArgumentError
from redrafter.files.atomic_folder import check_output_folder

RECORD_FILE = "training.json"


def check_output(output: Path, overwrite: bool) -> None:
    """Raise `ArgumentError` if `save_drafter` cannot write to `output`, or must not replace its content."""
    check_output_folder(output, overwrite, flag="--output", kinds=("drafter",))


def checkpoints_folder(output: Path) -> Path:
    """Return the folder of checkpoints for the output folder of a training."""
    return output.with_name(output.name + ".checkpoints")


def check_no_checkpoints(output: Path) -> None:
    """Raise `ArgumentError` if checkpoints of an earlier training exist.

    For a training with neither `--resume` nor `--overwrite`.
    """
    if (folder := checkpoints_folder(output)).exists():
        raise ArgumentError(
            f"{folder} holds an earlier training's checkpoints; continue with --resume, or start again with --overwrite"
        )
