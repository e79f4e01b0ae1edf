"""Read from the environment which of a launcher's processes this one is. This module imports no torch."""

import os

from redrafter.errors import ArgumentError


def is_launched() -> bool:
    """Return whether torchrun, or `--tensor-parallel-size`, has started this process, perhaps alone."""
    return "LOCAL_RANK" in os.environ


def launched_processes() -> int:
    """Return the number of processes that a launcher has started to share a model; 1 without a launcher.

    Raises:
        ArgumentError: WORLD_SIZE is not a positive number.
    """
    return _check("WORLD_SIZE", os.environ["WORLD_SIZE"], 1) if is_launched() and "WORLD_SIZE" in os.environ else 1


def process_rank() -> int:
    """Return this process's number among those that a launcher has started; 0 without a launcher.

    Raises:
        ArgumentError: RANK is missing, or is not a number below WORLD_SIZE.
    """
    return _check("RANK", os.environ.get("RANK", ""), 0, size) if (size := launched_processes()) > 1 else 0


def local_rank() -> int:
    """Return this process's number among those of its machine; raise `ArgumentError` where LOCAL_RANK is not one."""
    return _check("LOCAL_RANK", os.environ.get("LOCAL_RANK", ""), 0)


def _check(name: str, text: str, least: int, end: int | None = None) -> int:
    """Return the number in the text of a variable."""
    if not text.isdecimal() or int(text) < least or (end is not None and int(text) >= end):
        upper = "" if end is None else f" and less than WORLD_SIZE={end}"
        raise ArgumentError(
            f"the environment variable {name} must be a number of at least {least}{upper}, got {text!r}: torchrun sets "
            "LOCAL_RANK, RANK and WORLD_SIZE; unset LOCAL_RANK for one process"
        )
    return int(text)
