"""Write a file atomically: its path holds the old content or the new content, never a part of it."""

import stat
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from redrafter.errors import ArgumentError, first_line


def check_writable(path: Path, flag: str) -> None:
    """Raise `ArgumentError`, naming the option `flag`, unless `write_atomically` can write a file; leave nothing."""
    if not path.name or "\0" in str(path):
        raise ArgumentError(f"{flag} needs a file name, got {str(path)!r}")
    target = path.resolve()
    try:
        if target.is_dir():
            raise IsADirectoryError(None, "Is a directory")
        # A device or a pipe is written to in place, so no temporary file is needed.
        if not target.exists() or target.is_file():
            trial = _temporary_path(target)
            trial.touch()
            trial.unlink()
    except OSError as error:
        raise ArgumentError(f"cannot write {path} ({flag}): {first_line(error)}") from error


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file atomically: a reader finds the old content or the new content, never a part of it.

    A symbolic link is kept and its target is replaced; a device or a pipe is written to, not replaced. If
    `ArgumentError` is raised, no temporary file remains.
    """
    target, encoded = path.resolve(), content.encode() if isinstance(content, str) else content
    # In the same directory, as a rename is atomic only within one file system.
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
        raise ArgumentError(f"cannot write {path}: {first_line(error)}") from error


def share_weights(folder: Path) -> None:
    """Give the weights of a directory that was just saved the permissions of its config.json, which follow the umask.

    Safetensors creates files that only their owner can read.
    """
    config = folder / "config.json"
    if config.is_file():  # not where another process saves
        for file in folder.glob("*.safetensors"):
            file.chmod(stat.S_IMODE(config.stat().st_mode))


def _temporary_path(target: Path) -> Path:
    # A number of its own for each writer: threads share a process id, and so may containers that share a folder.
    return target.parent / f".{target.name}.{token_hex(4)}"
