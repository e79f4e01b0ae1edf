"""Where a trained drafter goes."""

import copy
import json
from pathlib import Path
from typing import Any

import torch

from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.drafting.drafter_config import DrafterConfig
from redrafter.files.atomic_folder import check_output_folder, write_folder

__all__ = ["check_output", "save"]


RECORD = "training.json"
BESIDE_WEIGHTS = {"README.md", "config.json", RECORD}  # what `save` writes beside the weights


def check_output(output: Path, overwrite: bool) -> None:
    """Raise `ArgumentError` when `save` would refuse to write there, or could not."""
    check_output_folder(output, overwrite, flag="--output", what="drafter", replaceable=_holds_drafter_or_its_rest)


def save(
    drafter: RecurrentDrafter,
    output: Path,
    card: str,
    facts: dict[str, Any],
    dtype: torch.dtype,
    overwrite: bool = False,
) -> None:
    """Write the drafter in `dtype`, its card, and `facts` as training.json. Raises as `write_folder` does."""
    check_output(output, overwrite)
    saved: Any = copy.deepcopy(drafter).cpu()

    def fill(folder: Path) -> None:
        saved.to(dtype).save_pretrained(folder)
        (folder / "README.md").write_text(card, encoding="utf-8")
        (folder / RECORD).write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    write_folder(output, fill)


def _holds_drafter_or_its_rest(folder: Path) -> bool:
    """Whether a folder holds a drafter, or nothing but what `save` writes beside a drafter's weights."""
    if _read(folder / "config.json").get("model_type") == DrafterConfig.model_type:
        return True
    here = {file.name for file in folder.iterdir()}
    return here <= BESIDE_WEIGHTS and "saved_step" in _read(folder / RECORD)


def _read(file: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one where there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
