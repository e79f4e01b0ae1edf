"""Rejection sampling of a sampled chain: other tokens than plain decoding draws, of the same distribution.

A draft x that was drawn from q is kept with probability min(1, p(x) / q(x)), where p is the target's distribution. In
place of the first draft that is not kept, a token is drawn from max(p - q, 0), normalised (Leviathan et al. 2023, Chen
et al. 2023). Whether to keep, and what to draw instead, is decided with noise of two streams that neither share
with each other nor with the stream that x was drawn under.
"""

import torch
from torch import Tensor

from redrafter.tree.token_tree import Tree

__all__ = ["draw_residual"]


def draw_residual(tree: Tree, scores: Tensor, noise: Tensor, chance: Tensor) -> Tensor:
    """Draw the token that follows each node of a chain: the node's child where that is kept, else another.

    Args:
        tree: A chain with `sampled_from`.
        scores: The target's scores, `[B, N, V]`.
        noise: Standard Gumbel noise for what is drawn in place of drafts, `[B, N, V]`.
        chance: Standard exponential noise for whether to keep, `[B, N]`. A draft is kept, with probability p / q, where
            log q - log p is below it.

    Returns:
        `[B, N]` int64.
    """
    assert tree.sampled_from is not None
    log_p = scores.log_softmax(dim=-1, dtype=torch.float32)
    log_q = tree.sampled_from.log_softmax(dim=-1, dtype=torch.float32)  # [B, N-1, V]
    drafts = tree.tokens[:, 1:, None]
    lead = (log_q.gather(2, drafts) - log_p[:, :-1].gather(2, drafts)).squeeze(2)  # [B, N-1]
    kept = lead < chance[:, :-1]
    residual = (log_p[:, :-1].exp() - log_q.exp()).clamp(min=0)
    # Where p and q are equal, up to rounding, nothing is left over, and p itself is what rounding spoils least.
    any_left = residual.sum(dim=-1, keepdim=True) > 0
    residual = torch.where(any_left, residual.log(), log_p[:, :-1])
    other = (torch.cat([residual, log_p[:, -1:]], dim=1) + noise).argmax(dim=-1)  # [B, N]
    return torch.cat([torch.where(kept, tree.tokens[:, 1:], other[:, :-1]), other[:, -1:]], dim=1)
