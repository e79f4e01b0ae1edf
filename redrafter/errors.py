"""The exceptions that this library raises on purpose, under one base class.

    ReDrafterError
    ├── ArgumentError        an argument is unknown, out of range, of the wrong shape
    ├── UnsupportedError     a model or a decoding mode cannot be served exactly
    │   └── MissingDependencyError  a feature needs a package that is not installed
    ├── MismatchError        a drafter was made for another target
    ├── CheckpointError      a checkpoint's files are missing, truncated or invalid
    └── CacheFullError       the KV cache has too few free blocks

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
    """The drafter was made for another hidden size, vocabulary or base model than the target has."""


class CheckpointError(ReDrafterError):
    """A checkpoint lacks a file or a tensor, is truncated, or holds a tensor that does not belong there."""


class CacheFullError(ReDrafterError):
    """The paged cache has too few free blocks for a row."""


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error message, to be quoted in a one-line message.

    A first line that ends in a colon is joined with the second; an empty message gives the name of the error's class.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
