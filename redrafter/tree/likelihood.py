"""Counts of searched, verified and accepted drafts by the likelihood that the drafter gives them.

A drafter's probabilities rank its drafts well but are poorly calibrated, so each step counts its drafts by likelihood.
The counts have a fixed size: the host reads the same few numbers for one row as for hundreds.
"""

from functools import lru_cache

import torch
from torch import Tensor

from redrafter.tree.accept import Path
from redrafter.tree.token_tree import Tree

# Likelihoods of a path that drafts are counted by, the highest first. Less likely drafts are not counted.
LIKELIHOODS = (0.9, 0.75, 0.6, 0.45, 0.32, 0.22, 0.14, 0.08, 0.04, 0.015)


def count_likely(score: Tensor) -> Tensor:
    """Return how many of the drafts are at least as likely as each of J likelihoods, `[..., J]` int64.

    Args:
        score: Log-probability of each draft's path, `[B, ...]`; drafts of all B rows are counted together.
    """
    return (score[..., None] >= bounds_on(score.device)).sum(dim=0)


@lru_cache(maxsize=8)
def bounds_on(device: torch.device) -> Tensor:
    """Return the logarithms of the likelihoods, `[J]` float32; shared by all callers, so never write to them."""
    return torch.tensor(LIKELIHOODS, device=device).log()


def count_outcomes(tree: Tree, path: Path) -> Tensor:
    """Count verified, accepted and searched drafts of all rows by their likelihood, `[2 + K, J]` int64.

    The first row counts drafts that were verified, the second those that were accepted, and the others all that were
    searched, by depth.
    """
    assert tree.score is not None, "these drafts have no scores"
    assert tree.candidates is not None
    index = torch.arange(1, tree.score.shape[1], device=tree.score.device)
    verified = tree.score[:, 1:]
    if tree.counts is not None:
        verified = verified.masked_fill(index >= tree.counts[:, None], -torch.inf)
    depth = torch.arange(1, path.nodes.shape[1], device=index.device)
    accepted = tree.score.gather(1, path.nodes[:, 1:]).masked_fill(depth > path.accepted[:, None], -torch.inf)
    return torch.cat([count_likely(verified.flatten())[None], count_likely(accepted.flatten())[None], tree.candidates])
