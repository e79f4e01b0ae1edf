"""The token tree that one step verifies.

Nodes stand in depth-major order, so a parent always comes before its children. Node 0 is the pending token: known,
not yet in the cache. Siblings never share a token, so at most one path through a tree can match a text.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from redrafter import kernels
from redrafter.errors import ArgumentError

__all__ = ["Tree", "chain", "check_size", "keep_best", "tree_of"]

MAX_BEAMS = 1024  # beams, and levels; a tree's memory grows with the square of its nodes


@dataclass(frozen=True)
class Tree:
    """`N` candidate tokens for each of `B` rows, of which a forward computes the last `M`: all of them, except while a
    draft model grows a tree level by level and has its upper nodes cached already.

    tokens: `[B, N]` int64, token ids of the target's vocabulary.
    parents: `[B, N]` int64, index of each node's parent; node 0 is its own.
    depth: `[B, N]` int64, 0 at node 0; node i stands at position `n + depth[i]` of its row.
    ancestors: `[B, M, N]` bool, `[b, i, j]` is true when j is node N - M + i or one of that node's ancestors.
    levels: how deep it was drafted below the root, known to the host. branches: whether a node may have several
        children; where none has, kept nodes already stand where they belong.
    sampled_from: `[B, N-1, V]` float32, unnormalised log-probabilities that node i + 1 was sampled from; None where
        drafts were chosen, whatever for.
    slots: `[B, N]` int64, where the proposer's own cache holds each node, counted from n; None where node i is in slot
        n + i, or where there is no such cache.
    """

    tokens: Tensor
    parents: Tensor
    depth: Tensor
    ancestors: Tensor
    levels: int
    branches: bool = True
    sampled_from: Tensor | None = None
    slots: Tensor | None = None

    @property
    def new(self) -> int:
        """M, the nodes to be computed."""
        return self.ancestors.shape[1]

    def last(self, count: int) -> "Tree":
        """The same tree, of which only the last `count` nodes are to be computed."""
        return replace(self, ancestors=self.ancestors[:, -count:])

    def to(self, device: torch.device) -> "Tree":
        """On another device."""
        moved: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **moved)


def tree_of(tokens: Tensor, parents: Tensor, depth: Tensor, max_depth: int) -> Tree:
    """Close the parent relation: `ancestors = (I + P)^(2^m)` with `2^m >= max_depth`, by repeated squaring."""
    if kernels.TRITON and tokens.is_cuda:
        return Tree(tokens, parents, depth, kernels.find_ancestors(parents, max_depth), max_depth)
    nodes = tokens.shape[1]
    eye = torch.eye(nodes, device=tokens.device)
    reach = (eye[parents] + eye).clamp_(max=1)  # [B, N, N]
    for _ in range(math.ceil(math.log2(max(max_depth, 1)))):
        reach = (reach @ reach).clamp_(max=1)
    return Tree(tokens, parents, depth, reach > 0, max_depth)


def chain(tokens: Tensor) -> Tree:
    """A tree without branches: `tokens` `[B, N]` one below the other. A prompt is one; so is a pending token alone."""
    rows, nodes = tokens.shape
    depth = torch.arange(nodes, device=tokens.device)
    ancestors = depth[:, None] >= depth[None, :]
    return Tree(
        tokens,
        (depth - 1).clamp(min=0).expand(rows, nodes),
        depth.expand(rows, nodes),
        ancestors.expand(rows, nodes, nodes),
        levels=nodes - 1,
        branches=False,
    )


def check_size(name: str, value: object) -> None:
    """Raise `ArgumentError` unless value can be a number of beams, of levels, or of nodes to keep."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_BEAMS**2:
        raise ArgumentError(f"{name} must be a positive integer, got {value!r}")
    if value > MAX_BEAMS and name != "node_budget":
        raise ArgumentError(f"{name} must be at most {MAX_BEAMS}, got {value}")


def keep_best(
    tokens: Tensor, parents: Tensor, depth: Tensor, score: Tensor, nodes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The `nodes` best-scored nodes of a lattice, still in depth-major order, with parents renumbered; and, last, which
    they were.

    tokens, parents, depth: `[B, N]`. score: `[B, N]`, never higher than the parent's, highest at node 0, so that
    what is kept is a tree. The sort is stable: on an exact tie the parent, which comes first, is kept.
    """
    order = score.sort(dim=1, descending=True, stable=True).indices[:, :nodes]
    kept = order.sort(dim=1).values  # [B, nodes], depth-major again
    renumber = torch.zeros_like(parents).scatter_(1, kept, torch.arange(nodes, device=kept.device).expand_as(kept))
    return tokens.gather(1, kept), renumber.gather(1, parents.gather(1, kept)), depth.gather(1, kept), kept
