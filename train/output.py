"""Where a trained drafter goes."""

import copy
import json
from pathlib import Path
from typing import Any

import torch

from redrafter.drafter import DrafterConfig, RecurrentDrafter
from redrafter.folder import check_folder, write_folder

__all__ = ["check_output", "save"]


def check_output(output: Path, overwrite: bool) -> None:
    """Raise `ArgumentError` when `save` would refuse to write there, or could not."""
    check_folder(output, overwrite, flag="--output", what="drafter", replaceable=_holds_drafter)


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
        (folder / "training.json").write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    write_folder(output, fill)


def _holds_drafter(folder: Path) -> bool:
    try:
        return json.loads((folder / "config.json").read_text())["model_type"] == DrafterConfig.model_type
    except (OSError, ValueError, KeyError, TypeError):
        return False
