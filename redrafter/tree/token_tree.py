"""The token tree that one step verifies.

Nodes are in depth-major order, so a parent always comes before its children. Node 0, the root, is the pending token:
known, not yet in the cache. Siblings have different tokens, so at most one path through a tree can match a sequence.
"""

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from redrafter import kernels
from redrafter.parallel.ranks import Ranks


@dataclass(frozen=True)
class Tree:
    """A tree of `N` candidate tokens for each of `B` rows.

    A forward computes the last `M` nodes. M is N, except while a draft model grows a tree level by level: the keys and
    values of the upper nodes are cached already then. Below, n is a row's number of committed tokens.

    Attributes:
        tokens: Token ids of the target's vocabulary, `[B, N]` int64.
        parents: Index of each node's parent, `[B, N]` int64; the root is its own.
        depth: Depth of each node, 0 at the root, `[B, N]` int64; node i is at position `n + depth[i]` of its row.
        ancestors: `[B, M, N]` bool; `[b, i, j]` is true when j is node N - M + i or one of that node's ancestors.
        levels: Levels drafted below the root; a number on the host.
        width: At least the number of nodes of any level; a number on the host.
        branches: Whether a node may have several children. In a tree without branches the keys and values of accepted
            nodes are in their final slots already.
        sampled_from: Unnormalised log-probabilities that node i + 1 was sampled from, `[B, N-1, V]` float32; None
            where drafts are not samples of a distribution.
        slots: Slot of each node in the draft model's cache, counted from its committed tokens, `[B, N]` int64; None
            where node i is in slot i after them, or where there is no draft model.
        draft_length: Committed tokens of each row in the draft model's cache, which `slots` are counted from, `[B]`
            int64; None where they are as many as the target's.
        counts: How many nodes of each row are verified, the first ones, `[B]` int64; None for all. The tree is ragged
            where there are counts.
        total: The sum of `counts`, a number on the host; None for all nodes.
        levels_above: Levels, the root's included, whose nodes were computed by earlier forwards; a number on the host.
        grafted: How many of the nodes, the last ones, were copied from the text in addition to another's drafts; a
            number on the host. They are in no order of depth.
    """

    tokens: Tensor
    parents: Tensor
    depth: Tensor
    ancestors: Tensor
    levels: int
    width: int
    branches: bool = True
    sampled_from: Tensor | None = None
    slots: Tensor | None = None
    draft_length: Tensor | None = None
    counts: Tensor | None = None
    total: int | None = None
    levels_above: int = 0
    grafted: int = 0

    @property
    def new(self) -> int:
        """M, the number of nodes that the next forward computes."""
        return self.ancestors.shape[1]

    @property
    def size(self) -> int:
        """How many nodes of all rows together the next forward computes."""
        return self.tokens.shape[0] * self.new if self.total is None else self.total

    @property
    def is_chain(self) -> bool:
        """Return whether each row is a chain, and the next forward computes all of its nodes."""
        return not self.branches and self.new == self.tokens.shape[1]

    @cached_property
    def _order(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert self.counts is not None, "a tree whose nodes are all computed is in order"
        order = kernels.token_order.token_order if kernels.TRITON and self.counts.is_cuda else token_order
        return order(self.counts, self.new, self.size)

    @property
    def row_starts(self) -> Tensor:
        """Index of each row's first node among those that the next forward computes, and then `size`, `[B+1]` int64."""
        if self.counts is None:
            return torch.arange(0, (len(self.tokens) + 1) * self.new, self.new, device=self.tokens.device)
        return self._order[0]

    @property
    def token_rows(self) -> Tensor:
        """The row of each node that the next forward computes, `[T]` int64, in a ragged tree."""
        return self._order[1]

    @property
    def verified_nodes(self) -> Tensor | slice:
        """Which of the `B * M` new nodes the next forward computes, `[T]` int64."""
        return slice(None) if self.counts is None else self._order[2]

    def by_row(self, x: Tensor) -> Tensor:
        """Return per-node values of a forward, `[T, D]`, as `[B, M, D]`; undefined where left out."""
        return x.view(len(self.tokens), -1, x.shape[-1]) if self.counts is None else x[self._order[3]]

    def last_level(self, count: int) -> "Tree":
        """Return the same tree with only its last level, `levels` deep and of `count` nodes, to be computed."""
        return replace(self, ancestors=self.ancestors[:, -count:], levels_above=self.levels)

    def of_first(self, ranks: Ranks) -> "Tree":
        """Return the tree that rank 0 drafted. Every rank drafts, but ranks may resolve ties differently."""
        if ranks.size == 1 or not self.levels:
            return self
        # Distributions are as large as the vocabulary, and only rank 0's tokens must be equal on all ranks.
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "sampled_from"}
        own = {name: x for name, x in values.items() if isinstance(x, Tensor)}
        drafted: dict[str, Any] = dict(zip(own, ranks.of_first(*own.values()), strict=True))
        return replace(self, **drafted)


def tree_of(tokens: Tensor, parents: Tensor, depth: Tensor, max_depth: int, width: int | None = None) -> Tree:
    """Make a tree of its nodes' tokens, parents and depths, all `[B, N]` int64.

    Ancestors are the closure of the parent relation: `(I + P)^(2^m)` with `2^m >= max_depth`, by repeated squaring; on
    a GPU, a kernel walks up from each node instead.

    Args:
        tokens: Token ids of the target's vocabulary.
        parents: Index of each node's parent; the root is its own.
        depth: Depth of each node, 0 at the root.
        max_depth: At least the depth of every node.
        width: At least the number of nodes of any level; None for what their number allows.
    """
    nodes = tokens.shape[1]
    width = max(nodes - 1, 1) if width is None else width
    if kernels.TRITON and tokens.is_cuda:
        ancestors = kernels.tree.find_ancestors(parents, max_depth)
        return Tree(tokens, parents, depth, ancestors, levels=max_depth, width=width)
    eye = torch.eye(nodes, device=tokens.device)
    reach = (eye[parents] + eye).clamp_(max=1)  # [B, N, N]
    # Each squaring doubles the depth that is reached, so few products of small matrices find all ancestors.
    for _ in range(math.ceil(math.log2(max(max_depth, 1)))):
        reach = (reach @ reach).clamp_(max=1)
    return Tree(tokens, parents, depth, ancestors=reach > 0, levels=max_depth, width=width)


def chain(tokens: Tensor) -> Tree:
    """Make a tree without branches: `tokens` `[B, N]`, each the child of the one before.

    A prompt is such a tree, and so is a pending token alone.
    """
    rows, nodes = tokens.shape
    depth = torch.arange(nodes, device=tokens.device)
    parents = (depth - 1).clamp(min=0).expand(rows, nodes)
    ancestors = (depth[:, None] >= depth).expand(rows, nodes, nodes)
    return Tree(tokens, parents, depth.expand(rows, nodes), ancestors, levels=nodes - 1, width=1, branches=False)


def eligible_scores(score: Tensor, eligible: Tensor) -> Tensor:
    """Return scores `[B, N]` with -inf in place of NaN, and at nodes that are not `eligible`, `[B, N]` bool."""
    # A sort in descending order would put NaN first.
    return torch.where(eligible, score.nan_to_num(nan=-torch.inf), -torch.inf)


def share_nodes(tree: Tree, score: Tensor, total: int) -> Tree:
    """Let the rows of a tree share `total` nodes: the root of each row, and the highest scores of all rows.

    A row whose drafts are likely has more of them verified than another. Nodes that are left out do not change the
    output, as a draft counts only if it is what the target itself draws.

    Args:
        tree: The trees of B rows, N nodes each, none of them sampled from a distribution.
        score: Score of each node, `[B, N]`, as `eligible_scores` returns them; never higher than the parent's.
        total: Nodes to verify, B at least and B * N at most.

    Returns:
        The ragged tree, whose verified nodes come first in each row.
    """
    tokens, parents, depth, _, counts = hold_best(tree.tokens, tree.parents, tree.depth, score, total)
    if tree.branches:  # the nodes of a chain that are held are the first ones already
        tree = tree_of(tokens, parents, depth, max_depth=tree.levels, width=tree.width)
    return replace(tree, counts=counts, total=total)


def hold_best(
    tokens: Tensor, parents: Tensor, depth: Tensor, score: Tensor, total: int, *, by_row: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Move the best `total` nodes of all rows to the front of their rows, where they keep their order.

    They are the root of each row, and then those of highest score. With `by_row`, they are those of each row, and no
    others are returned.

    Args:
        tokens: Token of each node, `[B, N]` int64.
        parents: Index of each node's parent, `[B, N]` int64.
        depth: Depth of each node, `[B, N]` int64.
        score: Score of each node, `[B, N]`; never higher than the parent's, and no NaN.
        total: Nodes to hold.
        by_row: Whether each row holds so many.

    Returns:
        Tokens, parents and depths of the moved nodes, their indices before, and how many of each row are held, `[B]`
        int64.
    """
    if kernels.TRITON and score.is_cuda:
        return kernels.tree.hold_best(tokens, parents, depth, score, total, by_row=by_row)
    rows, nodes = score.shape
    index = torch.arange(nodes, device=score.device)
    # A root is kept for any score, as its logits give the row's next token.
    ranked = score.masked_fill(index == 0, torch.inf).view((rows, nodes) if by_row else (1, rows * nodes))
    best = ranked.sort(dim=1, descending=True, stable=True).indices[:, :total]  # on a tie, a parent before its child
    held = torch.zeros_like(ranked, dtype=torch.long).scatter_(1, best, 1).view(rows, nodes)
    # Stable, so that parents stay before their children.
    order = held.sort(dim=1, descending=True, stable=True).indices[:, : total if by_row else nodes]
    renumber = torch.zeros_like(parents).scatter_(1, order, index[: order.shape[1]].expand_as(order))
    moved = tokens.gather(1, order), renumber.gather(1, parents.gather(1, order)), depth.gather(1, order)
    return *moved, order, held.sum(dim=1)


def token_order(counts: Tensor, nodes: int, total: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Order the first nodes of each row one after the other. This is the reference of a kernel for GPUs.

    Args:
        counts: How many of each row's nodes are tokens, `[B]` int64.
        nodes: M, nodes of a row.
        total: T, the sum of the counts.

    Returns:
        Index of each row's first token, and then T, `[B+1]`; the row of each token, `[T]`; which of the `B * M` nodes
        it is, `[T]`; the token of each node, `[B, M]`, and past a row's count its last one; all int64.
    """
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    index = torch.arange(total, device=counts.device)
    row = torch.searchsorted(starts[1:], index, right=True)
    # Entries past a row's count repeat its last node, as an index must stay among the tokens.
    by_row = torch.minimum(starts[:-1, None] + torch.arange(nodes, device=counts.device), starts[1:, None] - 1)
    return starts, row, row * nodes + index - starts[row], by_row


def nodes_by_level(tree: Tree) -> Tensor:
    """Return the new nodes of each row by their level, `[L, B, W]` int64, counted from the first new node.

    L and W are numbers on the host: levels that the next forward computes, and the most nodes that one of them may
    have. Where a row has fewer nodes at a level, or verifies fewer, M fills the remaining entries.

    Args:
        tree: The trees of B rows, M new nodes each.
    """
    new = tree.new
    depth = tree.depth[:, -new:]  # [B, M]
    if tree.counts is not None:  # nodes after the verified ones are in no order
        depth = depth.where(torch.arange(new, device=depth.device) < tree.counts[:, None], tree.levels + 1)
    levels = torch.arange(tree.levels_above, tree.levels + 1, device=depth.device)[:, None]  # [L, 1]
    # In depth-major order the nodes of a level are contiguous and follow all nodes above it.
    first = (depth < levels[..., None]).sum(dim=-1)  # [L, B]
    count = (depth == levels[..., None]).sum(dim=-1)  # [L, B]
    beam = torch.arange(tree.width, device=depth.device)
    index = first[..., None] + beam  # [L, B, W]
    if tree.grafted:
        # Grafted nodes come last at any depth, so their levels are not contiguous.
        order = depth.argsort(dim=1, stable=True).expand(len(levels), -1, -1)  # [L, B, M]
        index = order.gather(2, index.clamp(max=new - 1))
    return torch.where(beam < count[..., None], index, new)
