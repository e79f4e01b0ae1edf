"""Checks for what a picture needs, made before anything is measured."""

from importlib.util import find_spec
from pathlib import Path

from redrafter.errors import ArgumentError, MissingDependencyError
from redrafter.files.atomic_file import check_writable

__all__ = ["check_matplotlib", "check_picture"]


def check_matplotlib(flag: str) -> None:
    """Raise `MissingDependencyError` where matplotlib, which the option `flag` needs, is not installed."""
    if find_spec("matplotlib") is None:
        raise MissingDependencyError(f"{flag} needs matplotlib: pip install 'redrafter[bench]'")


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
