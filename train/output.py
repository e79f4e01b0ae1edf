"""Directories that are written whole, or not at all; a trained drafter's is one."""

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from redrafter.drafter import DrafterConfig, RecurrentDrafter
from redrafter.errors import ArgumentError, CheckpointError, first_line

__all__ = ["check_output", "clean", "save", "write_folder"]

LONGEST = 200  # bytes of a name, with room for what is put around it


def check_output(output: Path, overwrite: bool) -> None:
    """Raise `ArgumentError` when `save` would refuse to write there, or could not."""
    if not output.absolute().name or "\0" in str(output) or len(os.fsencode(output.name)) > LONGEST:
        raise ArgumentError(f"--output needs a directory's name of at most {LONGEST} bytes, got {str(output)[:80]!r}")
    clean(output)
    above = next(each for each in output.absolute().parents if each.exists())
    if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        raise ArgumentError(f"--output {output}: {above} is no directory that can be written to; name another place")
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not overwrite:
        raise ArgumentError(f"--output {output} is there already and not empty; name another, or pass --overwrite")
    if not _holds_drafter(output):
        raise ArgumentError(f"--output {output} holds something that is no drafter, which is never overwritten")


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


def write_folder(folder: Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` make the files of a folder under another name, see them on the disk, and then rename it, over the one
    that is there if need be. Killed at any moment, `clean` finds the old folder or the new one.

    Raises `CheckpointError` naming the folder when it cannot be written, and leaves nothing behind then.
    """
    folder = folder.absolute()
    partial, old = _beside(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        clean(folder)
        fill(partial)
        for file in (*partial.iterdir(), partial):
            _sync(file)
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
        _sync(folder.parent)
    except (OSError, RuntimeError, SafetensorError) as error:  # each library that writes has its own for a full disk
        raise CheckpointError(
            f"cannot write {folder}: {getattr(error, 'strerror', None) or first_line(error)}; free some space or name "
            "another place"
        ) from error
    finally:
        clean(folder)


def clean(folder: Path) -> None:
    """Remove what `write_folder` left when it was killed or failed; the folder is whole before and after, if it is."""
    partial, old = _beside(folder.absolute())
    if old.exists() and not folder.exists():
        old.rename(folder)
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)


def _beside(folder: Path) -> tuple[Path, Path]:
    return folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.old")


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # no such thing there
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _holds_drafter(folder: Path) -> bool:
    try:
        return json.loads((folder / "config.json").read_text())["model_type"] == DrafterConfig.model_type
    except (OSError, ValueError, KeyError, TypeError):
        return False
