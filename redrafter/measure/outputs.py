"""Checks of the files that a measurement is to write, before anything is measured. Nothing here imports torch."""

from importlib.util import find_spec
from pathlib import Path

from redrafter.errors import ArgumentError, MissingDependencyError, how_to_install
from redrafter.files.atomic_file import check_writable


def output_file(name: str | None, flag: str) -> Path | None:
    """Return the path of a file that a flag names, checked before anything is measured that it can be written."""
    if name is None:
        return None
    check_writable(Path(name), flag)
    return Path(name)


def check_picture(name: str | None, flag: str = "--plot", *, folder: bool = False) -> None:
    """Check before anything is measured that pictures can be drawn, into a `.png` or into a folder, which is made."""
    if name is None:
        return
    if find_spec("matplotlib") is None:
        raise MissingDependencyError(f"{flag} needs matplotlib: {how_to_install('bench')}")
    if folder:
        try:
            Path(name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(f"{flag} {name} cannot be a directory: {error.strerror or error}") from error
    elif Path(name).suffix != ".png":
        raise ArgumentError(f"{flag} draws a .png, got {name!r}")
    else:
        check_writable(Path(name), flag)
