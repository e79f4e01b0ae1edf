"""Directories that are written whole, or not at all."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
    """Let `fill` make the files in a folder of another name, see them on the disk, and rename it then, over the one
    that is there if need be. Killed at any moment, `clean` finds the old folder or the new one.

    Raises `CheckpointError` naming the folder when it cannot be written, `ArgumentError` while another process writes
    it, and leaves nothing behind then.
    """
    folder = folder.absolute()
    partial, old = _beside(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        clean(folder)
        if partial.exists():
            raise ArgumentError(f"another process is writing {folder}; wait for it, or name another place")
        try:
            partial.mkdir()
            with _locked(partial):
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
    """Remove what `write_folder` left when it was killed or failed; the folder is whole before and after, if it is.
    While another process writes it, that is left alone."""
    partial, old = _beside(folder.absolute())
    if partial.exists():
        with suppress(OSError), _locked(partial):
            shutil.rmtree(partial)
    if old.exists() and not folder.exists() and not partial.exists():
        old.rename(folder)
    if not partial.exists():
        shutil.rmtree(old, ignore_errors=True)


def _beside(folder: Path) -> tuple[Path, Path]:
    return folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.old")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, which the system lets go of after any kill. Raises `BlockingIOError` where it is held."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # no such thing there
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
