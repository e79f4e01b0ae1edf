"""Sizes that a tree of drafts may have. This module imports no torch."""

from redrafter.errors import ArgumentError

MAX_BEAMS = 1024  # also of levels; a tree's memory grows with the square of its nodes


def check_size(name: str, value: object) -> None:
    """Raise `ArgumentError` unless `value` can be the number of beams, levels or nodes that argument `name` sets."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_BEAMS**2:
        raise ArgumentError(f"{name} must be a positive integer, got {value!r}")
    if value > MAX_BEAMS and name != "node_budget":
        raise ArgumentError(f"{name} must be at most {MAX_BEAMS}, got {value}")
