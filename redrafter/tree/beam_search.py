"""Beam search that keeps every candidate it selected, as a token tree.

Each of the K search steps selects W distinct (source beam, token) pairs. All of them become nodes, linked by their
back-pointers (a lattice): `N = 1 + W * K`, without duplicates by construction. The published method keeps only the
prefixes of the W beams that survive to the end; the lattice costs the drafter nothing more, and more of its drafts are
accepted.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from redrafter import kernels
from redrafter.parallel.ranks import Ranks
from redrafter.tree.token_tree import Tree, chain, eligible_scores, hold_best, share_nodes, tree_of

CPU_NODE_BUDGET = 12  # nodes; on a CPU each costs arithmetic. Best or nearly for the boxed pair, see docs/benchmarks.md


class PartOfScores(NamedTuple):
    """Scores of the ids that this rank has scored, where ranks divide the proposer's ids.

    Attributes:
        scores: Unnormalised log-probabilities, `[B, w, V'_r]`.
        first: The proposer's id of the first score.
        vocabulary: V', ids of all ranks.
        ranks: The ranks.
    """

    scores: Tensor
    first: int
    vocabulary: int
    ranks: Ranks

    def best(self, total: Tensor, width: int, ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Select the best pairs of all ranks, with the arguments and result of `top_continuations`. Collective."""
        scores, size = self.scores, self.ranks.size
        if kernels.TRITON and scores.is_cuda:
            return kernels.tree.top_continuations(
                scores, total, width, ids, first=self.first, vocabulary=self.vocabulary, share=self.ranks.sum
            )
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        found = scores.topk(min(width, scores.shape[-1]), dim=-1)
        missing = (0, width - found.values.shape[-1])
        values, numbers = pad(found.values, missing, value=-torch.inf), pad(found.indices + self.first, missing)
        own = torch.cat([values, numbers.to(values), scores.logsumexp(dim=-1, keepdim=True)], dim=-1)  # [B, w, 2W + 1]
        parts = torch.unflatten(self.ranks.join_last(own), -1, (size, -1))
        values, numbers, whole = parts.split([width, width, 1], dim=-1)  # [B, w, ranks, W or 1]
        # Rounding may put a log-probability above 0, but no child may score higher than its parent.
        best = (values - whole.logsumexp(dim=2, keepdim=True)).float().clamp(max=0)
        best = best.masked_fill(best.isnan(), -torch.inf)
        score, pair = rearrange(best + total[:, :, None, None], "b w r n -> b (w r n)").topk(width, dim=-1)  # [B, W]
        token = numbers.flatten(1).gather(1, pair).long()
        return score, pair // (size * width), token if ids is None else ids[token]


class Candidates(NamedTuple):
    """Scores of a few tokens that may follow each beam.

    Attributes:
        scores: Unnormalised log-probabilities, `[B, w, C]`.
        tokens: The tokens, of which those of a beam are different, `[B, w, C]` int64.
    """

    scores: Tensor
    tokens: Tensor

    def best(self, total: Tensor, width: int, ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Select the best pairs as `top_continuations` does; a beam has at least `width` tokens."""
        score, source, candidate = top_continuations(self.scores, total, width, None)
        token = self.tokens.flatten(1).gather(1, source * self.tokens.shape[-1] + candidate)
        return score, source, token if ids is None else ids[token]


Expand = Callable[[int, Tensor, Tensor], Tensor | PartOfScores | Candidates]
"""Scores the next tokens of every beam: `expand(k, tokens [B, w], sources [B, w]) -> scores [B, w, V']`.

`k` is the search step, `tokens` the last token of each beam, and `sources` the beam of the previous step that each one
continues. The scores are unnormalised log-probabilities, of all ids, of a rank's part of the ids, or of a few tokens.
"""


def beam_search(
    root: Tensor,
    expand: Expand,
    *,
    beams: int,
    depth: int,
    nodes: int,
    ids: Tensor | None = None,
    limits: Tensor | None = None,
    shared: int | None = None,
    least: float | None = None,
    on_level: Callable[[Tensor], object] | None = None,
) -> Tree:
    """Search `depth` steps with `beams` beams and return the best `nodes` candidates as a tree.

    Args:
        root: The pending token of each row, `[B]` int64.
        expand: Scores the next tokens of every beam.
        beams: W, beams kept at each search step.
        depth: K, search steps.
        nodes: Number of nodes to keep, including the root, by highest cumulative log-probability.
        ids: The target's id of each of the proposer's ids, `[V']` int64; None where they are the same.
        limits: Levels of drafts that each row takes, `[B]` int64, 0 for none; None for all in each row.
        shared: How many nodes of all rows together to verify, as `share_nodes` describes; None to verify all
            nodes that are kept.
        least: Log-probability of a node. No row keeps more nodes than the row with the most that are at least this
            likely; None for no such limit.
        on_level: Called after each search step with the beams' cumulative log-probabilities, `[B, W]`.
    """
    rows = len(root)
    level, first, score, source = _layout(rows, beams, depth, root.device)
    token = root[:, None]
    tokens, sources, scores = [token], [source], [score]
    for k in range(depth if beams > 1 else min(depth, nodes - 1)):  # a chain drafts no node to be cut
        found = expand(k, token, source)
        if isinstance(found, Tensor):
            score, source, token = top_continuations(found, score, beams, ids)  # [B, W] each
        else:
            score, source, token = found.best(score, beams, ids)  # [B, W] each
        tokens.append(token)
        sources.append(source)
        scores.append(score)
        if on_level is not None:
            on_level(score)
    lattice_tokens, score = torch.cat(tokens, 1), torch.cat(scores, 1)  # [B, N]
    count = lattice_tokens.shape[1]
    if limits is not None:
        score = eligible_scores(score, level[:count] <= limits[:, None])
    lattice = lattice_tokens, torch.cat(sources, 1) + first[:count], level[:count].expand(rows, -1)
    if least is not None:
        nodes = min(nodes, max(int((score >= least).sum(dim=1).max()), 1))
    # A chain was cut above by searching fewer steps, so its nodes need no selection.
    if beams == 1 or nodes == 1:
        tree, score = chain(lattice_tokens[:, :nodes]), score[:, :nodes]
    elif nodes >= count:
        tree = tree_of(*lattice, max_depth=len(tokens) - 1, width=beams)
    else:
        kept_tokens, parents, depths, slots, _ = hold_best(*lattice, score, nodes, by_row=True)
        # The draft model has stored the whole lattice, where a kept node keeps its slot.
        tree = replace(tree_of(kept_tokens, parents, depths, len(tokens) - 1, width=beams), slots=slots)
    if shared is not None and shared < tree.tokens.numel():
        tree = share_nodes(tree, score if tree.slots is None else score.gather(1, tree.slots), shared)
    return tree


def node_count(budget: int | None, beams: int, depth: int, device: torch.device) -> int:
    """Return how many of a search's `1 + beams * depth` nodes to keep.

    Args:
        budget: The most nodes that the user wants; None for a default that suits the device.
        beams: W, beams of the search.
        depth: K, steps of the search.
        device: Where the target runs.
    """
    lattice = 1 + beams * depth
    # A deep search keeps at least one full path, or its last levels could never be verified.
    default = max(CPU_NODE_BUDGET, 1 + depth) if device.type == "cpu" else lattice
    return min(budget or default, lattice)


@cache  # never dropped: captured steps read these tensors
def _layout(rows: int, beams: int, depth: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the tensors that all searches of one size begin with.

    They are cached and shared between searches, so never write to them. Nodes are numbered by search step: the root is
    node 0, and step k, from 1 on, has nodes `1 + (k - 1) * W` to `k * W`, one for each beam.

    Returns for each of the `N = 1 + W * K` nodes its depth and the number of the first node of the step before its own,
    `[N]` int64 each: added to the beam that a node continues, the latter is the node's parent. Then for the root its
    score, 0, `[B, 1]` float32, and the beam it continues, taken to be 0, `[B, 1]` int64.
    """
    level = (torch.arange(1 + beams * depth, device=device) + beams - 1) // beams
    zero = torch.zeros(rows, 1, device=device)
    return level, (1 + (level - 2) * beams).clamp_(min=0), zero, zero.long()


def top_continuations(scores: Tensor, total: Tensor, width: int, ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Select the best pairs of a beam and a token that follows it.

    Args:
        scores: Unnormalised log-probabilities of the next token, `[B, w, V']`.
        total: Cumulative log-probabilities of the beams so far, `[B, w]` float32.
        width: W, pairs to select.
        ids: The target's id of each of the proposer's ids, `[V']` int64; None where they are the same.

    Returns:
        Cumulative log-probabilities (float32), beams and tokens (int64) of the selected pairs, `[B, W]` each, best
        first.
    """
    if kernels.TRITON and scores.is_cuda:
        return kernels.tree.top_continuations(scores, total, width, ids)
    if width == scores.shape[1] == 1:  # a chain: the best token, without a sort
        best, token = scores.float().max(dim=-1)  # [B, 1]
        # Rounding may put a log-probability above 0, but no child may score higher than its parent.
        score = total + (best - scores.logsumexp(dim=-1).float()).clamp(max=0)
        return score, torch.zeros_like(token), token if ids is None else ids[token]
    log_probs = scores.log_softmax(dim=-1, dtype=torch.float32)
    best, index = log_probs.topk(width, dim=-1)  # [B, w, W]: the best W pairs are among the best W of each beam
    # As a sort takes a NaN for the largest number, a tree that is cut would lose its root.
    best = best.masked_fill(best.isnan(), -torch.inf)
    score, pair = rearrange(best + total[:, :, None], "b w n -> b (w n)").topk(width, dim=-1)  # [B, W]
    token = rearrange(index, "b w n -> b (w n)").gather(1, pair)
    return score, pair // width, token if ids is None else ids[token]
