"""Which nodes of a tree the target's own draws confirm.

This is the line that makes the output exact: a node is kept only when the target, asked at the node's parent, drew that
node's very token. Whatever the drafter proposed, the tokens that come out are the target's own draws, each made after
exactly the prefix that plain decoding would have had.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.tree.token_tree import Tree

__all__ = ["Path", "accept"]


@dataclass(frozen=True)
class Path:
    """The kept nodes, from node 0 down.

    nodes: `[B, K+1]` int64; entries past `accepted` are 0. accepted: `[B]` int64, the number of kept drafts.
    """

    nodes: Tensor
    accepted: Tensor

    @property
    def end(self) -> Tensor:
        """`[B]` int64, the deepest kept node."""
        return self.nodes.gather(1, self.accepted[:, None]).squeeze(1)

    def without_drafts(self, rows: Tensor) -> "Path":
        """Keep node 0 alone in some rows, `[B]` bool."""
        return Path(self.nodes.masked_fill(rows[:, None], 0), self.accepted.masked_fill(rows, 0))


def accept(tree: Tree, drawn: Tensor, max_depth: int) -> Path:
    """Keep node 0, and every node whose parent is kept and whose token is what was drawn at its parent.

    drawn: `[B, N]` int64, the target's own next token at every node. max_depth: K, at least the depth of every node.
    Siblings differ, so the kept nodes are one path.
    """
    rows, nodes = drawn.shape
    if max_depth == 0:  # plain decoding: node 0 alone
        nothing = torch.zeros(rows, 1, dtype=torch.long, device=drawn.device)
        return Path(nothing, nothing[:, 0])
    confirmed = tree.tokens == drawn.gather(1, tree.parents)  # [B, N]
    confirmed[:, 0] = True
    kept = ~(tree.ancestors & ~confirmed[:, None, :]).any(dim=-1)  # a node and all above it are confirmed
    level = torch.where(kept, tree.depth, max_depth + 1)  # what is not kept goes to a column that is cut off
    path = torch.zeros(rows, max_depth + 2, dtype=torch.long, device=drawn.device)
    path.scatter_(1, level, torch.arange(nodes, device=drawn.device).expand(rows, nodes))
    return Path(path[:, : max_depth + 1], kept.sum(dim=1) - 1)
