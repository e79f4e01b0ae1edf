"""Tilings, which say how a product with a weight is cut into the programs of a kernel."""

from typing import NamedTuple

__all__ = ["Tiling"]


class Tiling(NamedTuple):
    """Describes how a product is cut into programs.

    Attributes:
        tokens: Tokens per program.
        features: Output features per program.
        step: Input features that are loaded at once.
        stages: Loads under way at once.
        warps: Warps of a program.
        splits: Parts of the input features, for kernels that cut them; None for as many as keep a large GPU busy.
    """

    tokens: int
    features: int
    step: int
    stages: int
    warps: int
    splits: int | None = None
