"""Write a file atomically: its path holds the old content or the new content, never a part of it."""

import os
import stat
from contextlib import suppress
from pathlib import Path

from redrafter.errors import ArgumentError


def check_writable(path: Path, flag: str) -> None:
    """Raise `ArgumentError`, naming the option `flag`, unless `write_atomically` can write a file; leave nothing."""
    if not path.name or "\0" in str(path):
        raise ArgumentError(f"{flag} needs a file name, got {str(path)!r}")
    target = path.resolve()
    try:
        if target.is_dir():
            raise IsADirectoryError(None, "Is a directory")
        if not target.exists() or target.is_file():
            trial = _temporary_path(target)
            trial.touch()
            trial.unlink()
    except OSError as error:
        raise ArgumentError(f"cannot write {path} ({flag}): {error.strerror or error}") from error


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file such that a reader finds the old content or the new content, never a part of it.

    A symbolic link stays and its target is replaced; a device or a pipe is written to, not replaced. No temporary file
    remains where it raises `ArgumentError`.
    """
    target, encoded = path.resolve(), content.encode() if isinstance(content, str) else content
    # In the same directory: a rename is atomic within one file system alone.
    temporary = _temporary_path(target)
    try:
        if target.exists() and not target.is_file() and not target.is_dir():
            target.write_bytes(encoded)
            return
        temporary.write_bytes(encoded)
        temporary.replace(target)
    except (OSError, ValueError) as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise ArgumentError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error


def share_weights(folder: Path) -> None:
    """Give the weights of a directory that was just saved the mode of its config.json, which follows the umask.

    Safetensors makes files that their owner alone can read, and transformers leaves them so.
    """
    config = folder / "config.json"
    if config.is_file():  # not where another process saves
        for file in folder.glob("*.safetensors"):
            file.chmod(stat.S_IMODE(config.stat().st_mode))


def _temporary_path(target: Path) -> Path:
    return target.parent / f".{target.name}.{os.getpid()}"
