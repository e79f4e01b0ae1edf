"""Acceptance: the path of drafts that agree with the target's own draws.

The comparison in `accept` makes the output exact: a node is accepted only if the target, at the node's parent, drew
that node's token. Whatever was drafted, the tokens that come out are the target's own draws, each made after the prefix
that undrafted decoding would have had.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.tree.token_tree import Tree


@dataclass(frozen=True)
class Path:
    """The accepted nodes of each row's tree, from the root down.

    Attributes:
        nodes: Index of the accepted node at each depth, `[B, K+1]` int64; 0 past `accepted`.
        accepted: Number of accepted drafts, `[B]` int64; the root is none.
    """

    nodes: Tensor
    accepted: Tensor

    @property
    def end(self) -> Tensor:
        """Index of the deepest accepted node, `[B]` int64."""
        return self.nodes.gather(1, self.accepted[:, None]).squeeze(1)

    def below_reread_token(self) -> "Path":
        """Return the path in trees whose node 0 is the last committed token, computed again, and node 1 the root.

        The path ends one node earlier: the next step computes the last accepted node again.
        """
        return Path(torch.nn.functional.pad(self.nodes + 1, (1, 0)), self.accepted)


def acceptable_nodes(tree: Tree, limits: Tensor | None = None) -> Tensor | None:
    """Return which nodes may be accepted if the target draws them, `[B, N]` bool; None for all.

    They are those that the target has verified, at most `limits` `[B]` int64 levels below the root of their row.
    """
    verified: Tensor | None = None
    if tree.counts is not None:
        # Nodes past a row's count have no keys and values, even where their parent drew their token.
        verified = torch.arange(tree.tokens.shape[1], device=tree.counts.device) < tree.counts[:, None]
    if limits is None or tree.levels == 0:
        return verified
    shallow = tree.depth <= limits[:, None]
    return shallow if verified is None else verified & shallow


def accept(tree: Tree, drawn: Tensor, max_depth: int, acceptable: Tensor | None = None) -> Path:
    """Accept the root, and every node whose parent is accepted and whose token was drawn at its parent.

    Siblings have different tokens, so these nodes form one path. It is read upwards from the deepest of them: whatever
    was drafted, the ancestors of one node form a path.

    Args:
        tree: The verified tree.
        drawn: The target's own next token at every node, `[B, N]` int64.
        max_depth: K, at least the depth of every node.
        acceptable: The nodes that may be accepted, `[B, N]` bool, from `acceptable_nodes`; None for those
            that were verified.
    """
    rows, nodes = drawn.shape
    if max_depth == 0:  # undrafted decoding: the root alone
        root = torch.zeros(rows, 1, dtype=torch.long, device=drawn.device)
        return Path(root, root[:, 0])
    confirmed = tree.tokens == drawn.gather(1, tree.parents)  # [B, N]
    if acceptable is None:
        acceptable = acceptable_nodes(tree)
    if acceptable is not None:
        confirmed &= acceptable
    # The root is the pending token, which an earlier step drew.
    confirmed[:, 0] = True
    accepted = ~(tree.ancestors & ~confirmed[:, None, :]).any(dim=-1)  # [B, N]: the node and its ancestors agree
    # The deepest accepted node names the path, as its ancestors are accepted too. -1 never wins: the root has depth 0.
    length, end = tree.depth.masked_fill(~accepted, -1).max(dim=1)  # [B] each
    on_path = tree.ancestors.gather(1, end[:, None, None].expand(rows, 1, nodes)).squeeze(1)  # [B, N]
    level = torch.where(on_path, tree.depth, max_depth + 1)  # other nodes go to a column that is cut off
    path = torch.zeros(rows, max_depth + 2, dtype=torch.long, device=drawn.device)
    path.scatter_(1, level, torch.arange(nodes, device=drawn.device).expand(rows, nodes))
    return Path(path[:, : max_depth + 1], length)
