"""The pictures of `bench`, `tune` and `evaluate`: checked for before anything is measured, drawn with matplotlib."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

from redrafter.errors import ArgumentError, MissingDependencyError, how_to_install
from redrafter.files.atomic_file import check_writable, write_atomically

__all__ = ["batch_size_axis", "check_picture", "drawing"]


def check_picture(path: Path, flag: str = "--plot", *, folder: bool = False) -> None:
    """Check that pictures can be drawn and written to `path`.

    Args:
        path: The file to write, a `.png`.
        flag: The option that named it, for messages.
        folder: Whether `path` is a folder for several pictures, which is made.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ArgumentError: The path is not a `.png` or cannot be written, or the folder cannot be made.
    """
    if find_spec("matplotlib") is None:
        raise MissingDependencyError(f"{flag} needs matplotlib: {how_to_install('bench')}")
    if folder:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(f"{flag} {path} cannot be a directory: {error.strerror or error}") from error
        return
    if path.suffix != ".png":
        raise ArgumentError(f"{flag} draws a .png, got {str(path)!r}")
    check_writable(path, flag)


@contextmanager
def drawing(path: Path, conditions: str = "", size: tuple[float, float] = (8, 5), **grid: Any) -> Iterator[Any]:
    """Yield matplotlib's axes to draw on, and write them as a PNG file when the context is left.

    Args:
        path: The file to write.
        conditions: What was measured, written below the picture.
        size: Width and height in inches.
        grid: Arguments of `Figure.subplots`, for several axes.

    Raises:
        ArgumentError: The file cannot be written; nothing is left behind.
    """
    from matplotlib.figure import Figure  # without pyplot, which asks for a window system

    figure = Figure(figsize=size, layout="constrained")
    yield figure.subplots(**grid)
    figure.supxlabel(conditions, fontsize=7)
    png = BytesIO()
    figure.savefig(png, dpi=144, format="png")
    write_atomically(path, png.getvalue())


def batch_size_axis(axes: Any, batch_sizes: Sequence[int]) -> None:
    """Make the x-axis of matplotlib's `axes` one of batch sizes: logarithmic, with a tick at each size measured."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(batch_sizes, [str(size) for size in batch_sizes])
    axes.minorticks_off()
    axes.set_xlabel("rows in a batch")
    axes.grid(alpha=0.3)
