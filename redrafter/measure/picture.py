"""What the pictures of `bench`, `tune` and `evaluate` share: checks before anything is measured, and an axis."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from redrafter.errors import ArgumentError, MissingDependencyError, how_to_install
from redrafter.files.atomic_file import check_writable

__all__ = ["batch_size_axis", "check_matplotlib", "check_picture", "check_picture_folder"]


def check_matplotlib(flag: str) -> None:
    """Raise `MissingDependencyError` where matplotlib, which the option `flag` needs, is not installed."""
    if find_spec("matplotlib") is None:
        raise MissingDependencyError(f"{flag} needs matplotlib: {how_to_install('bench')}")


def check_picture(path: Path, flag: str = "--plot") -> None:
    """Check that a picture can be drawn and written to `path`.

    Args:
        path: The file to write, a `.png`.
        flag: The option that named it, for messages.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ArgumentError: The path is not a `.png` or cannot be written.
    """
    check_matplotlib(flag)
    if path.suffix != ".png":
        raise ArgumentError(f"{flag} draws a .png, got {str(path)!r}")
    check_writable(path, flag)


def check_picture_folder(folder: Path, flag: str = "--plots") -> None:
    """Check that pictures can be drawn, and make the folder that they are written to.

    Args:
        folder: The folder to make.
        flag: The option that named it, for messages.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ArgumentError: The folder cannot be made.
    """
    check_matplotlib(flag)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"{flag} {folder} cannot be a directory: {error.strerror or error}") from error


def batch_size_axis(axes: Any, batch_sizes: Sequence[int]) -> None:
    """Make the x-axis of matplotlib's `axes` one of batch sizes: logarithmic, with a tick at each size measured."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(batch_sizes, [str(size) for size in batch_sizes])
    axes.minorticks_off()
    axes.set_xlabel("rows in a batch")
