"""Read from the environment which of a launcher's processes this one is. This module imports no torch."""

import os


def is_launched() -> bool:
    """Return whether torchrun, or `--tensor-parallel-size`, has started this process, perhaps alone."""
    return "LOCAL_RANK" in os.environ


def launched_processes() -> int:
    """Return the number of processes that a launcher has started to share a model; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1")) if is_launched() else 1


def process_rank() -> int:
    """Return this process's number among those that a launcher has started; 0 without a launcher."""
    return int(os.environ.get("RANK", "0")) if launched_processes() > 1 else 0
