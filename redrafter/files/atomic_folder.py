"""Directories that are written whole, or not at all."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
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
    place = Path(os.path.realpath(folder))
    above = next(each for each in place.parents if each.exists())
    if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        raise ArgumentError(f"{flag} {folder}: {above} is no directory that can be written to; name another place")
    clean(folder)
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return
    if not overwrite:
        raise ArgumentError(f"{flag} {folder} is there already and not empty; name another, or pass --overwrite")
    if not replaceable(place):
        raise ArgumentError(f"{flag} {folder} holds something that is no {what}, which is never overwritten")


def write_folder(folder: Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` make the files in a folder of another name, see them on the disk, and rename it then, over the one
    that is there if need be; a link is followed. Killed at any moment, `clean` finds the old folder or the new one.

    Raises `CheckpointError` naming the folder when it cannot be written, `ArgumentError` while another process writes
    it, and leaves nothing behind then.
    """
    place = Path(os.path.realpath(folder))
    partial, old = _beside(place)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        clean(place)
        with ExitStack() as lock:
            try:
                partial.mkdir()
                lock.enter_context(_locked(partial))
            except (FileExistsError, BlockingIOError, FileNotFoundError) as error:
                raise ArgumentError(f"another process is writing {folder}; wait, or name another place") from error
            try:
                fill(partial)
                for file in (*partial.rglob("*"), partial):
                    _sync(file)
                if place.exists():
                    place.rename(old)
                partial.rename(place)
                _sync(place.parent)
            finally:
                lock.close()
                clean(place)
    except (OSError, RuntimeError, SafetensorError) as error:  # each library that writes has its own for a full disk
        said = getattr(error, "strerror", None) or first_line(error)
        full = any(word in said for word in ("space", "quota", "too large"))
        hint = "; free some space or name another place" if full else ""
        raise CheckpointError(f"cannot write {folder}: {said}{hint}") from error


def clean(folder: Path) -> None:
    """Remove what `write_folder` left when it was killed or failed; the folder is whole before and after, if it is.
    While another process writes it, that is left alone."""
    place = Path(os.path.realpath(folder))
    partial, old = _beside(place)
    if partial.exists():
        with suppress(OSError), _locked(partial):
            shutil.rmtree(partial)
    if partial.exists():
        return
    if old.exists() and not place.exists():
        with suppress(OSError):
            old.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def _beside(folder: Path) -> tuple[Path, Path]:
    """Names that nobody else gives."""
    return folder.with_name(f".{folder.name}.redrafter-partial"), folder.with_name(f".{folder.name}.redrafter-old")


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
