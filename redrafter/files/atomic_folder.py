"""Write a directory atomically: its path holds the old directory or the new one, never a part of one."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from redrafter.errors import ArgumentError, CheckpointError, ReDrafterError, first_line
from redrafter.files.checkpoint_kind import kind_of

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


MAX_NAME_BYTES = 200  # file systems allow 255; names of partial and old folders add some


def check_output_folder(folder: Path, overwrite: bool, *, flag: str, kinds: Sequence[str]) -> None:
    """Check that `write_folder` can write a folder, and may replace what the folder holds.

    Leftovers of an earlier `write_folder` are removed first.

    Args:
        folder: Folder to write. Missing parents are allowed.
        overwrite: Whether a folder that is not empty may be replaced.
        flag: The option that named the folder, for errors.
        kinds: Results of `kind_of` for folders that may be replaced. Others never are, even with `overwrite`.
    """
    if not folder.absolute().name or "\0" in str(folder) or len(os.fsencode(folder.name)) > MAX_NAME_BYTES:
        message = f"{flag} needs a directory's name of at most {MAX_NAME_BYTES} bytes, got {str(folder)[:80]!r}"
        raise ArgumentError(message)
    target = Path(os.path.realpath(folder))
    # The nearest existing parent, as missing ones will be made.
    parent = next(path for path in target.parents if path.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise ArgumentError(f"{flag} {folder}: {parent} is not a writable directory; name another place")
    remove_leftovers(folder)
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise ArgumentError(f"{flag} {folder} is there already and not empty; name another, or pass --overwrite")
    with suppress(ReDrafterError):  # a broken checkpoint is of no kind
        if kind_of(target) in kinds:
            return
    raise ArgumentError(f"{flag} {folder} holds something that is no {' or '.join(kinds)}, which is never overwritten")


def write_folder(folder: Path, fill: Callable[[Path], object]) -> None:
    """Write a folder such that a reader finds the old folder or the new one, never a part of one.

    `fill` writes into a partial folder next to `folder`. Its files are synced to disk, an existing folder is renamed to
    make way, and the partial folder is renamed to `folder`; a symbolic link is followed. After a kill at any moment,
    `remove_leftovers` leaves the whole old folder or the whole new one.

    Raises:
        ArgumentError: If another process is writing the same folder.
        CheckpointError: If the folder cannot be written. No partial folder remains then.
    """
    target = Path(os.path.realpath(folder))
    partial, old = _working_paths(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target)
        with ExitStack() as lock:
            try:
                partial.mkdir()
                lock.enter_context(_locked(partial))
            except (FileExistsError, BlockingIOError, FileNotFoundError) as error:
                raise ArgumentError(f"another process is writing {folder}; wait, or name another place") from error
            try:
                fill(partial)
                # The rename may reach the disk before the contents do, and a power cut would leave empty files under
                # the new name.
                for file in (*partial.rglob("*"), partial):
                    sync_to_disk(file)
                if target.exists():
                    target.rename(old)
                partial.rename(target)
                sync_to_disk(target.parent)
            finally:
                lock.close()
                remove_leftovers(target)
    except (OSError, RuntimeError, SafetensorError) as error:  # libraries raise different errors for a full disk
        message = first_line(error)
        full = any(word in message for word in ("space", "quota", "too large"))
        hint = "; free some space or name another place" if full else ""
        raise CheckpointError(f"cannot write {folder}: {message}{hint}") from error


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed or failed `write_folder` left next to a folder, and restore the old folder if necessary.

    Nothing is changed while another process is writing the folder.
    """
    target = Path(os.path.realpath(folder))
    partial, old = _working_paths(target)
    if partial.exists():
        # A partial folder whose lock is free belongs to a process that has ended.
        with suppress(OSError), _locked(partial):
            shutil.rmtree(partial)
    if partial.exists():
        return
    # The writer was killed between its two renames.
    if old.exists() and not target.exists():
        with suppress(OSError):
            old.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _working_paths(folder: Path) -> tuple[Path, Path]:
    return folder.with_name(f".{folder.name}.redrafter-partial"), folder.with_name(f".{folder.name}.redrafter-old")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, which the system releases when the process ends, however it ends."""
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


def sync_to_disk(path: Path) -> None:
    """Flush a file or a directory entry from the system's cache to the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot sync a directory
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
