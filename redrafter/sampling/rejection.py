"""Rejection sampling of a sampled chain: other tokens than plain decoding draws, of the same distribution.

A draft x that was drawn from q is kept with probability min(1, p(x) / q(x)), where p is the target's distribution; in
place of the first one that is not, a token is drawn from what p has more than q, max(p - q, 0) (Leviathan et al. 2023,
Chen et al. 2023). Whether to keep, and what to draw instead, is decided with noise of two streams that neither share
with each other nor with the stream that x was drawn under.
"""

import torch
from torch import Tensor

from redrafter.tree.token_tree import Tree

__all__ = ["draw_residual"]


def draw_residual(tree: Tree, scores: Tensor, noise: Tensor, chance: Tensor) -> Tensor:
    """The token that follows each node of a chain, `[B, N]` int64: its child where that is kept, else another.

    tree: a chain with `sampled_from`. scores: `[B, N, V]`, the target's. noise: `[B, N, V]`, standard Gumbel, for what
    is drawn instead. chance: `[B, N]`, standard exponential, for whether to keep: a draft is, with probability p / q,
    when log q - log p is below it.
    """
    assert tree.sampled_from is not None
    log_p = scores.log_softmax(dim=-1, dtype=torch.float32)
    log_q = tree.sampled_from.log_softmax(dim=-1, dtype=torch.float32)  # [B, N-1, V]
    drafts = tree.tokens[:, 1:, None]
    lead = (log_q.gather(2, drafts) - log_p[:, :-1].gather(2, drafts)).squeeze(2)  # [B, N-1]
    kept = lead < chance[:, :-1]
    residual = (log_p[:, :-1].exp() - log_q.exp()).clamp(min=0)
    # Where p and q are equal, up to rounding, nothing is left over, and p itself is what rounding spoils least.
    some = residual.sum(dim=-1, keepdim=True) > 0
    residual = torch.where(some, residual.log(), log_p[:, :-1])
    other = (torch.cat([residual, log_p[:, -1:]], dim=1) + noise).argmax(dim=-1)  # [B, N]
    return torch.cat([torch.where(kept, tree.tokens[:, 1:], other[:, :-1]), other[:, -1:]], dim=1)
