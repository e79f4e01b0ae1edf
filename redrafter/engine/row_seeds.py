"""The seed of each row, from what a call gives."""

from collections.abc import Sequence
from typing import Any

import torch

from redrafter.errors import ArgumentError

__all__ = ["Seed", "row_seeds"]

Seed = int | Sequence[int] | None


def row_seeds(seed: Any, rows: int) -> list[int]:
    """Return a seed per row: s, s+1, ... for an int s, or the values of a sequence; numbers of numpy and torch too.

    For None, s is drawn from torch's CPU generator, so that `torch.manual_seed` makes calls repeatable.
    """
    if seed is None:
        seed = torch.randint(1 << 62, (), device="cpu")
    seed = _in_python(seed)
    if isinstance(seed, int):
        if seed < 1 << 63 < seed + rows:
            raise ArgumentError(
                f"seed={seed} is too large for {rows} output rows, which have it and those that follow: give at most "
                f"{(1 << 63) - rows}, or one per row"
            )
        seeds = [seed + row for row in range(rows)]
    elif isinstance(seed, Sequence) and not isinstance(seed, str):
        if len(seed) != rows:
            raise ArgumentError(f"seed has {len(seed)} entries for {rows} output rows; give one int or one per row")
        seeds = [_in_python(each) for each in seed]
    else:
        seeds = [seed]
    for value in seeds:
        if not isinstance(value, int) or not 0 <= value < 1 << 63:
            raise ArgumentError(f"a seed is an int from 0 to 2**63 - 1, got {value!r}")
    return seeds


def _in_python(value: Any) -> Any:
    """Return an array, a tensor or a scalar of one as lists and numbers of Python; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value
