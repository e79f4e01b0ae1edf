"""Sums over the vocabulary whose order does not depend on how many rows are summed.

On a GPU torch shares the threads of a block out to rows, so the running sum of a row alone and of the same row among
others end in other bits; and where rows begin at odd addresses, so do their softmaxes. A token at the edge of top-p
would be kept in one batch and not in another.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["row_softmax", "running_sum"]

TILE = 128  # numbers that are summed before the sums of tiles are
ALIGNED = 16  # numbers, a multiple of what a GPU loads at once


def running_sum(x: Tensor) -> Tensor:
    """Return the cumulative sum of `x` `[..., V]` over its last dimension, by additions of numbers alone."""
    count = x.shape[-1]
    tiles = _sum_by_doubling(pad(x, (0, -count % TILE)).unflatten(-1, (-1, TILE)))  # [..., V / TILE, TILE]
    before = pad(_sum_by_doubling(tiles[..., -1])[..., :-1], (1, 0))
    return (tiles + before[..., None]).flatten(-2)[..., :count]


def _sum_by_doubling(x: Tensor) -> Tensor:
    """Return the cumulative sum of `x` `[..., M]` in log2(M) additions of all numbers (Hillis and Steele 1986)."""
    shift = 1
    while shift < x.shape[-1]:
        x = x + pad(x[..., :-shift], (shift, 0))
        shift *= 2
    return x


def row_softmax(x: Tensor) -> Tensor:
    """Return the softmax of `x` `[..., V]` over its last dimension, computed of rows that all begin alike."""
    count = x.shape[-1]
    return pad(x, (0, -count % ALIGNED), value=-torch.inf).softmax(dim=-1)[..., :count]
