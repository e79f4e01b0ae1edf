"""The nodes of a tree by level, in tensors of a fixed size."""

import torch
from torch import Tensor

from redrafter.tree.token_tree import Tree

__all__ = ["nodes_by_level"]


def nodes_by_level(tree: Tree) -> Tensor:
    """Return the new nodes of each row by their level, `[L, B, W]` int64, counted from the first new node.

    L and W are numbers on the host: levels that the next forward computes, and the most nodes that one of them may
    have. Where a row has fewer at a level, or verifies fewer, M stands in their place.

    Args:
        tree: The trees of B rows, M new nodes each.
    """
    new = tree.new
    depth = tree.depth[:, -new:]  # [B, M]
    if tree.counts is not None:  # nodes behind those that are verified are in no order
        depth = depth.where(torch.arange(new, device=depth.device) < tree.counts[:, None], tree.levels + 1)
    levels = torch.arange(tree.levels_above, tree.levels + 1, device=depth.device)[:, None]  # [L, 1]
    first, count = ((compared.sum(dim=-1)) for compared in _compare(depth, levels))  # [L, B] each
    beam = torch.arange(tree.width, device=depth.device)
    return torch.where(beam < count[..., None], first[..., None] + beam, new)


def _compare(depth: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Return which nodes are above each level and which are at it, `[L, B, M]` bool each."""
    return depth < levels[..., None], depth == levels[..., None]
