"""Directories that are written whole, or not at all."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from redrafter.errors import ArgumentError, CheckpointError, first_line

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["check_folder", "clean", "write_folder"]

LONGEST = 200  # bytes of a name, with room for what is put around it


def check_folder(folder: Path, overwrite: bool, *, flag: str, what: str, replaceable: Callable[[Path], bool]) -> None:
    """Raise `ArgumentError` when `write_folder` could not write there, or must not.

    flag: the option that named it. what, replaceable: which folders `overwrite` is about; others are never replaced.
    """
    if not folder.absolute().name or "\0" in str(folder) or len(os.fsencode(folder.name)) > LONGEST:
        raise ArgumentError(f"{flag} needs a directory's name of at most {LONGEST} bytes, got {str(folder)[:80]!r}")
    clean(folder)
    above = next(each for each in folder.absolute().parents if each.exists())
    if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        raise ArgumentError(f"{flag} {folder}: {above} is no directory that can be written to; name another place")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not overwrite:
        raise ArgumentError(f"{flag} {folder} is there already and not empty; name another, or pass --overwrite")
    if not replaceable(folder):
        raise ArgumentError(f"{flag} {folder} holds something that is no {what}, which is never overwritten")


def write_folder(folder: Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` make the files of a folder under another name, see them on the disk, and then rename it, over the one
    that is there if need be. Killed at any moment, `clean` finds the old folder or the new one.

    Raises `CheckpointError` naming the folder when it cannot be written, `ArgumentError` while another process writes
    it, and leaves nothing behind then.
    """
    folder = folder.absolute()
    partial, old = _beside(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            try:
                clean(folder)
                fill(partial)
                for file in (*partial.rglob("*"), partial):
                    _sync(file)
                if folder.exists():
                    folder.rename(old)
                partial.rename(folder)
                _sync(folder.parent)
            finally:
                clean(folder)
    except (OSError, RuntimeError, SafetensorError) as error:  # each library that writes has its own for a full disk
        raise CheckpointError(
            f"cannot write {folder}: {getattr(error, 'strerror', None) or first_line(error)}; free some space or name "
            "another place"
        ) from error


def clean(folder: Path) -> None:
    """Remove what `write_folder` left when it was killed or failed; the folder is whole before and after, if it is."""
    partial, old = _beside(folder.absolute())
    if old.exists() and not folder.exists():
        old.rename(folder)
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)


def _beside(folder: Path) -> tuple[Path, Path]:
    return folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.old")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """While this process writes a folder no other does. The system holds the lock, and lets go of it after any kill."""
    place = folder.with_name(f".{folder.name}.lock")
    with place.open("w") as lock:
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ArgumentError(
                    f"another process is writing {folder}; wait for it, or name another place"
                ) from None
            except OSError:
                pass  # a file system without locks
        try:
            yield
        finally:
            place.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # no such thing there
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
