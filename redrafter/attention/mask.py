"""Who sees whom when a tree stands behind rows of unequal length.

A row's first n slots hold committed tokens, whose slot is their position. Node i waits in scratch slot n + i at
position n + depth[i]. A node sees every committed slot and its own ancestors; with a sliding window or chunks, only
those near enough by position. Masks are additive floats: with a boolean one, eager attention is silently wrong.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["AttentionKind", "additive_mask", "visible_slots"]


@dataclass(frozen=True)
class AttentionKind:
    """How far back a layer looks: everything, the last `window` positions, or its own chunk of `chunk` positions."""

    window: int | None = None
    chunk: int | None = None


def visible_slots(length: Tensor, depth: Tensor, ancestors: Tensor, slots: int, kind: AttentionKind) -> Tensor:
    """length: `[B]`; depth: `[B, N]`; ancestors: `[B, M, N]` bool. Returns `[B, M, S]` bool over the first S slots."""
    rows, nodes = depth.shape
    node = torch.arange(slots, device=length.device) - length[:, None]  # [B, S], negative where committed
    index = node.clamp(0, nodes - 1)
    new = ancestors.shape[1]
    seen = ancestors.gather(2, index[:, None, :].expand(rows, new, slots))  # [B, M, S]
    seen = (node < 0)[:, None, :] | (seen & (node < nodes)[:, None, :])
    if kind.window is None and kind.chunk is None:
        return seen
    at = torch.where(node < 0, node, depth.gather(1, index))[:, None, :]  # positions, counted from n: [B, 1, S]
    if kind.window is not None:
        return seen & (depth[:, -new:, None] - at < kind.window)
    assert kind.chunk is not None
    base = length[:, None, None]
    return seen & ((depth[:, -new:, None] + base) // kind.chunk == (at + base) // kind.chunk)


def additive_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """`[B, M, S]` bool to `[B, 1, M, S]` float: 0 where seen, the lowest finite value elsewhere."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]
