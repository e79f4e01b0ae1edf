"""Count accepted drafts for trees of many shapes, which are cut out of one search.

The lattice of a deep search begins with that of a shallower one as wide, and a node budget keeps the best nodes of it.
So one search serves all shapes of one width. What a cut keeps is closed towards the root: of the path that the
base drew through the whole lattice, it keeps the first part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from redrafter.drafting.context_attention import ContextWindow
from redrafter.drafting.drafter import RecurrentDrafter, RecurrentProposer
from redrafter.drafting.proposer import State
from redrafter.sampling.sampler import Sampler
from redrafter.target.target import Target
from redrafter.tree.accept import accept
from redrafter.tree.token_tree import Tree, keep_best

__all__ = ["Shape", "count_accepted"]


@dataclass(frozen=True)
class Shape:
    """Shape of the tree that a step verifies.

    Attributes:
        beams: Beams W of the search.
        depth: Depth K of the search.
        nodes: Best nodes N of the search that are verified, the root counted. None for the tree of the published
            method: the prefixes of the W beams that are left at the end of the search.
    """

    beams: int
    depth: int
    nodes: int | None

    def __str__(self) -> str:
        kept = "final beams" if self.nodes is None else f"{min(self.nodes, self.lattice)} nodes"
        return f"{self.beams}x{self.depth}, {kept}"

    @property
    def lattice(self) -> int:
        """Nodes that the search finds, the root counted."""
        return 1 + self.beams * self.depth


def count_accepted(
    drafter: RecurrentDrafter,
    target: Target,
    state: State,
    sampler: Sampler,
    noise: Tensor | None,
    shapes: Sequence[Shape],
    window: ContextWindow | None = None,
) -> Tensor:
    """Count the drafts that are accepted and those that are verified at A positions.

    Args:
        drafter: Drafter, in eval mode.
        target: The base.
        state: State at the positions. Its `tokens` are `[A, K+2]`, each position's pending token and the tokens that
            the base drew after it, for K the depth of the deepest shape.
        sampler: How the base samples.
        noise: Noise of the tokens after the pending one, `[A, K, V]`; None when greedy.
        shapes: Shapes of the tree.
        window: What the drafter reads of the texts at the positions; None where it reads nothing.

    Returns:
        Drafts accepted and drafts verified, `[2, A, shapes]` int64.
    """
    counts = torch.zeros(2, len(state.length), len(shapes), dtype=torch.long, device=state.tokens.device)
    for beams in {shape.beams for shape in shapes}:
        columns = [column for column, shape in enumerate(shapes) if shape.beams == beams]
        depth = max(shapes[column].depth for column in columns)
        # The search ranks each node by the sum of the drafter's log-probabilities, noise included, from the root to it.
        scores = [torch.zeros_like(state.length[:, None], dtype=torch.float32)]
        proposer = RecurrentProposer(drafter, target, beams, depth, 1 + beams * depth)
        lattice = proposer.search(state, sampler, noise, should_stop=partial(_record, scores), window=window)
        score = torch.cat(scores, dim=1)  # [A, N]
        path = accept(lattice, state.tokens.gather(1, lattice.depth + 1), depth)  # [A, K+1]
        drawn = torch.arange(depth, device=score.device) < path.accepted[:, None]  # [A, K]
        for column in columns:
            kept = _kept(lattice, score, shapes[column])  # [A, N]
            within = slice(shapes[column].depth)
            accepted = kept.gather(1, path.nodes[:, 1:][:, within]) & drawn[:, within]
            counts[:, :, column] = torch.stack([accepted.sum(dim=1), kept.sum(dim=1) - 1])
    return counts


def _record(scores: list[Tensor], score: Tensor) -> bool:
    """Keep the scores of a step of the search, which goes on."""
    scores.append(score)
    return False


def _kept(lattice: Tree, score: Tensor, shape: Shape) -> Tensor:
    """Return which of the lattice's first nodes, those of the shape's own search, it keeps: `[A, shape.lattice]`."""
    count = shape.lattice
    if shape.nodes is None:
        return lattice.ancestors[:, count - shape.beams : count, :count].any(dim=1)
    if shape.beams == 1:  # rounding may put a node of a chain above its parent
        return (torch.arange(count, device=score.device) < shape.nodes).expand(len(score), -1)
    tokens, parents, depth, score = (x[:, :count] for x in (lattice.tokens, lattice.parents, lattice.depth, score))
    *_, best = keep_best(tokens, parents, depth, score, min(shape.nodes, count))
    return torch.zeros_like(score, dtype=torch.bool).scatter(1, best, True)
