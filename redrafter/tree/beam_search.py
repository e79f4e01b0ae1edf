"""Beam search over a proposer's steps, keeping the whole lattice.

Each of the K search steps selects W distinct (source beam, token) pairs. All of them become nodes, linked by their
back-pointers: `N = 1 + W * K`, with no duplicates by construction. The published method keeps only the prefixes of the
W beams that survive to the end; the lattice costs the drafter nothing more and is accepted further.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from einops import rearrange
from torch import Tensor

from redrafter import kernels
from redrafter.tree.token_tree import Tree, chain, keep_best, tree_of

__all__ = ["Expand", "beam_search", "node_count", "top_continuations"]

CPU_NODE_BUDGET = 12  # a node costs arithmetic there; measured best for the boxed pair, see README.md

Expand = Callable[[int, Tensor, Tensor], Tensor]
"""`expand(k, tokens [B, w], sources [B, w]) -> scores [B, w, V']`: unnormalised log-probabilities of what may follow
each beam's last token at search step k. `sources` says which of the previous step's beams each one continues."""


def beam_search(
    root: Tensor,
    expand: Expand,
    *,
    beams: int,
    depth: int,
    nodes: int,
    ids: Tensor | None = None,
    should_stop: Callable[[Tensor], bool] | None = None,
) -> Tree:
    """Search `depth` steps with `beams` beams and keep the `nodes` nodes of highest cumulative log-probability.

    root: `[B]` int64, the pending token. ids: `[V']` int64, the target's id of each of the proposer's ids; None where
    they are the same. should_stop: asked after each step, with the cumulative log-probabilities `[B, W]` of its beams,
    whether to end there.
    """
    rows = len(root)
    level, first, score, source = _layout(rows, beams, depth, root.device)
    token = root[:, None]
    tokens, sources, scores = [token], [source], [score]
    for k in range(depth if beams > 1 else min(depth, nodes - 1)):  # of a chain, nothing is drafted to be cut
        score, source, token = top_continuations(expand(k, token, source), score, beams, ids)  # [B, W] each
        tokens.append(token)
        sources.append(source)
        scores.append(score)
        if should_stop is not None and should_stop(score):
            break
    tree = torch.cat(tokens, 1)
    if beams == 1:
        return chain(tree)
    count = tree.shape[1]
    lattice = tree, torch.cat(sources, 1) + first[:count], level[:count].expand(rows, -1)
    if nodes >= count:
        return tree_of(*lattice, max_depth=len(tokens) - 1)
    tree, parents, levels, slots = keep_best(*lattice, torch.cat(scores, 1), nodes)
    return replace(tree_of(tree, parents, levels, max_depth=len(tokens) - 1), slots=slots)


def node_count(budget: int | None, beams: int, depth: int, device: torch.device) -> int:
    """Nodes to keep of a search's `1 + beams * depth`: as many as are asked for, or as suit the device."""
    lattice = 1 + beams * depth
    suits = max(CPU_NODE_BUDGET, 1 + depth) if device.type == "cpu" else lattice
    return min(budget or suits, lattice)


@lru_cache(maxsize=64)
def _layout(rows: int, beams: int, depth: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What every search begins with. Of each node, its depth and the node that the previous step's first beam ends in,
    `[N]` int64; of each row's root, its score and its source, `[B, 1]`. Not to be written to."""
    level = (torch.arange(1 + beams * depth, device=device) + beams - 1) // beams
    zero = torch.zeros(rows, 1, device=device)
    return level, (1 + (level - 2) * beams).clamp_(min=0), zero, zero.long()


def top_continuations(scores: Tensor, total: Tensor, wide: int, ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The `wide` = W best pairs of a beam and what follows it.

    scores: `[B, w, V']`, unnormalised log-probabilities. total: `[B, w]` float32, of the beams so far. ids: as in
    `beam_search`. Returns their cumulative log-probabilities float32, beams and tokens int64, `[B, W]`, best first.
    """
    if kernels.TRITON and scores.is_cuda:
        return kernels.top_continuations(scores, total, wide, ids)
    if wide == scores.shape[1] == 1:  # a chain: the best token, without a sort
        best, token = scores.float().max(dim=-1)  # [B, 1]
        score = total + best - scores.logsumexp(dim=-1).float()
        return score, torch.zeros_like(token), token if ids is None else ids[token]
    log_probs = scores.log_softmax(dim=-1, dtype=torch.float32)
    best, index = log_probs.topk(wide, dim=-1)  # [B, w, W]: the best W pairs are among the best W of each beam
    score, pair = rearrange(best + total[:, :, None], "b w n -> b (w n)").topk(wide, dim=-1)  # [B, W]
    token = rearrange(index, "b w n -> b (w n)").gather(1, pair)
    return score, pair // wide, token if ids is None else ids[token]
