"""Every error a user can cause, under one base.

    ReDrafterError
    ├── ArgumentError        an argument that cannot be honoured: unknown, out of range, of the wrong shape
    ├── UnsupportedError     a model or a decoding mode that this method cannot serve
    │   └── MissingDependencyError  what was asked for needs a package that is not installed
    ├── MismatchError        a drafter that was made for another target
    ├── CheckpointError      files that are missing, cut short or not what they claim
    └── CacheFullError       more keys and values at once than the memory set aside for them holds

A message says what was wrong, what was found, and what to type instead. The command line prints it on one
line and exits with code 2.
"""

__all__ = [
    "ArgumentError",
    "CacheFullError",
    "CheckpointError",
    "MismatchError",
    "MissingDependencyError",
    "ReDrafterError",
    "UnsupportedError",
]


class ReDrafterError(Exception):
    """Base of every error raised on purpose by this library."""


class ArgumentError(ReDrafterError, ValueError):
    """An argument is unknown, out of range, of the wrong shape, or cannot be combined with another."""


class UnsupportedError(ReDrafterError):
    """The model's architecture, or the decoding mode asked for, cannot be served exactly."""


class MissingDependencyError(UnsupportedError):
    """A feature needs a package, or an operating system, that this installation lacks."""


class MismatchError(ReDrafterError):
    """The drafter was made for another hidden size, vocabulary or base than the target's."""


class CheckpointError(ReDrafterError):
    """A checkpoint is missing a file or a tensor, is truncated, or holds what it should not."""


class CacheFullError(ReDrafterError):
    """The paged cache has too few free blocks for a row."""


def first_line(error: BaseException) -> str:
    """Return the first line of somebody else's error, and the next where it ends in a colon, for a message of one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
