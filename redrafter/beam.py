"""Beam search over a proposer's steps, keeping the whole lattice.

Each of the K search steps selects W distinct (source beam, token) pairs. All of them become nodes, linked by their
back-pointers: `N = 1 + W * K`, with no duplicates by construction. The published method keeps only the prefixes of the
W beams that survive to the end; the lattice costs the drafter nothing more and is accepted further.
"""

from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor

from redrafter.tree import Tree, keep_best, tree_of

__all__ = ["Expand", "beam_search"]

Expand = Callable[[int, Tensor, Tensor], Tensor]
"""`expand(k, tokens [B, w], sources [B, w]) -> scores [B, w, V']`: unnormalised log-probabilities, float32, of what may
follow each beam's last token at search step k. `sources` says which of the previous step's beams each one continues."""


def beam_search(root: Tensor, expand: Expand, *, beams: int, depth: int, nodes: int, ids: Tensor | None = None) -> Tree:
    """Search `depth` steps with `beams` beams and keep the `nodes` nodes of highest cumulative log-probability.

    root: `[B]` int64, the pending token. ids: `[V']` int64, the target's id of each of the proposer's ids; None where
    they are the same.
    """
    rows, device = root.shape[0], root.device
    token, score = root[:, None], torch.zeros(rows, 1, device=device)
    source = beam_node = torch.zeros(rows, 1, dtype=torch.long, device=device)  # beam_node: a beam's end in the tree
    tokens, parents, scores = [token], [beam_node], [score]
    for k in range(depth):
        log_probs = expand(k, token, source).log_softmax(dim=-1)  # [B, w, V']
        best, index = log_probs.topk(beams, dim=-1)  # [B, w, W]: the best W pairs are among the best W of each beam
        total = best + score[:, :, None]
        score, pair = rearrange(total, "b w n -> b (w n)").topk(beams, dim=-1)  # [B, W]
        source = pair // beams
        token = rearrange(index, "b w n -> b (w n)").gather(1, pair)
        token = token if ids is None else ids[token]
        tokens.append(token)
        parents.append(beam_node.gather(1, source))
        scores.append(score)
        beam_node = torch.arange(1 + k * beams, 1 + (k + 1) * beams, device=device).expand(rows, beams)
    node = torch.arange(1 + beams * depth, device=device)
    lattice = torch.cat(tokens, 1), torch.cat(parents, 1), ((node + beams - 1) // beams).expand(rows, -1)
    if nodes < len(node):
        lattice = keep_best(*lattice, torch.cat(scores, 1), nodes)
    return tree_of(*lattice, max_depth=depth)
