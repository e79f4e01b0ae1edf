"""Read from the environment which of torchrun's processes this one is. This module imports no torch."""

import os


def launched_processes() -> int:
    """Return the number of processes that torchrun has started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1


def process_rank() -> int:
    """Return this process's number among those that torchrun has started; 0 without torchrun."""
    return int(os.environ.get("RANK", "0")) if launched_processes() > 1 else 0
