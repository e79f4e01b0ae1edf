"""The seed of each row, from what a call gives."""

import secrets
from collections.abc import Sequence

from redrafter.errors import ArgumentError

__all__ = ["Seed", "row_seeds"]

Seed = int | Sequence[int] | None


def row_seeds(seed: Seed, rows: int) -> list[int]:
    """Return a seed per row: s, s+1, ... for an int s, the values of a list, fresh ones for None."""
    if seed is None:
        return [secrets.randbits(62) for _ in range(rows)]
    if isinstance(seed, Sequence) and not isinstance(seed, str):
        if len(seed) != rows:
            raise ArgumentError(f"seed has {len(seed)} entries for {rows} output rows; give one int or one per row")
        seeds = list(seed)
    else:
        seeds = [seed + row for row in range(rows)] if isinstance(seed, int) else [seed]
    for value in seeds:
        if not isinstance(value, int) or not 0 <= value < 1 << 63:
            raise ArgumentError(f"a seed is an int from 0 to 2**63 - 1, got {value!r}")
    return seeds
