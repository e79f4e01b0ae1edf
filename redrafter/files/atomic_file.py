"""Files that are written whole or not at all."""

import os
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from redrafter.errors import ArgumentError

__all__ = ["check_writable", "write_figure", "write_whole"]


def check_writable(path: Path, what: str) -> None:
    """Raise `ArgumentError` where `write_whole` would fail: the directory must be there. Leaves nothing behind. what:
    the flag that named it."""
    if not path.name or "\0" in str(path):
        raise ArgumentError(f"{what} needs a file name, got {str(path)!r}")
    place = path.resolve()
    try:
        if place.is_dir():
            raise IsADirectoryError(None, "Is a directory")
        if not place.exists() or place.is_file():
            trial = _unfinished(place)
            trial.touch()
            trial.unlink()
    except OSError as error:
        raise ArgumentError(f"cannot write {path} ({what}): {error.strerror or error}") from error


def write_whole(path: Path, text: str | bytes) -> None:
    """A reader finds the old content or the new one, never a half. A link keeps pointing; a device is written to, not
    replaced. Raises `ArgumentError` when it cannot be written, and leaves nothing behind then."""
    place, content = path.resolve(), text.encode() if isinstance(text, str) else text
    unfinished = _unfinished(place)
    try:
        if place.exists() and not place.is_file() and not place.is_dir():
            place.write_bytes(content)
            return
        unfinished.write_bytes(content)
        unfinished.replace(place)
    except (OSError, ValueError) as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise ArgumentError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error


def write_figure(path: Path, figure: Any) -> None:
    """A matplotlib figure as a PNG, as `write_whole`."""
    drawn = BytesIO()
    figure.savefig(drawn, dpi=144, format="png")
    write_whole(path, drawn.getvalue())


def _unfinished(place: Path) -> Path:
    return place.parent / f".{place.name}.{os.getpid()}"
