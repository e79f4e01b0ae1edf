"""The first stage of a head in two stages: a low-rank product proposes ids, the only ones that the head scores.

Every level of a search reads the whole head of a drafter: with 128,256 ids it is most of the bytes of a draft, and only
a few of its logits matter. A product of low rank scores all ids roughly, with a fraction of the bytes. The C best of
each beam are candidates, and their exact logits are computed from their rows of the head. A token is lost if the rough
scores do not rank it among the best C; the target verifies drafts, so the output does not change.
"""

import torch
from torch import Tensor, nn

from redrafter import kernels
from redrafter.model.linear_layers import Float8Linear
from redrafter.sampling.sampler import Sampler
from redrafter.tree.beam_search import Candidates


class Shortlist(nn.Module):
    """Scores all ids roughly, from the input of the head."""

    def __init__(self, width: int, rank: int, vocabulary: int):
        """Make a first stage of a rank for a head that reads `width` features, with random weights."""
        super().__init__()
        self.proj = nn.Linear(width, rank, bias=False)
        self.head = nn.Linear(rank, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return rough logits `[..., V']` for inputs of the head, `[..., R]`."""
        logits: Tensor = self.head(self.proj(x))
        return logits

    def choose(
        self,
        x: Tensor,
        head: nn.Linear,
        count: int,
        sampler: Sampler,
        noise: Tensor | None,
        step: int,
        names: Tensor | None,
    ) -> Candidates:
        """Score the likeliest ids of every beam with the head; all shapes are fixed, and no value is read on the host.

        Args:
            x: Inputs of the head, `[B, w, R]`.
            head: The head.
            count: C, candidates of each beam; all ids where there are fewer.
            sampler: How the target will draw.
            noise: The noise that the target will draw with, by depth, `[B, K+1, V]`; None if greedy.
            step: Number of the search step, from 0.
            names: The target's id of each of the drafter's ids, `[V']` int64; None where they are the same.
        """
        ids = likeliest_ids(self(x), count, sampler=sampler, noise=noise, step=step, names=names)
        if kernels.TRITON and x.is_cuda:
            temperature, drawn = (None, None) if noise is None else (sampler.temperature, noise[:, step])
            scale = head.weight_scale if isinstance(head, Float8Linear) else None
            return Candidates(
                kernels.candidate_scores(
                    x, head.weight, scale=scale, ids=ids, temperature=temperature, noise=drawn, names=names
                ),
                ids,
            )
        exact = (head_rows(head, ids, x.dtype) @ x[..., None])[..., 0]
        return Candidates(sampler.draft_scores(exact, noise, step, ids if names is None else names[ids]), ids)


def likeliest_ids(
    rough: Tensor, count: int, *, sampler: Sampler, noise: Tensor | None, step: int, names: Tensor | None
) -> Tensor:
    """Return the likeliest ids of every beam, `[B, w, C]`, in no order; C is `count`, or all ids where there are fewer.

    The scores have the target's noise too: the drawn token may be unlikely by the logits alone. Shapes are fixed, and
    no value is read on the host.

    Args:
        rough: Rough logits, `[B, w, V']`.
        count: Number of ids.
        sampler: As in `Shortlist.choose`, and likewise the others.
        noise: `[B, K+1, V]`.
        step: Number of the search step, from 0.
        names: `[V']` int64.
    """
    if kernels.TRITON and rough.is_cuda and 4 * count <= rough.shape[-1]:
        temperature, drawn = (None, None) if noise is None else (sampler.temperature, noise[:, step])
        ids: Tensor = kernels.best_of_parts(rough, count, temperature=temperature, noise=drawn, names=names)
        return ids
    scores = sampler.draft_scores(rough, noise, step, names)
    return scores.topk(min(count, rough.shape[-1]), dim=-1, sorted=False).indices


def head_rows(head: nn.Linear, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of a head's weight, FP8 or not, `[..., R]` for ids `[...]`."""
    if not isinstance(head, Float8Linear):
        return head.weight[ids]
    rows = head.weight.view(torch.uint8)[ids].view(head.weight.dtype)  # not every device can index FP8 tensors
    return rows.to(dtype) * head.weight_scale[ids][..., None].to(dtype)


def low_rank_factors(head: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the weights of `proj` and `head` of a `Shortlist`, the best of a rank for a head's weight.

    The directions are the head's singular vectors, found as eigenvectors of a matrix `[R, R]`, since V' is far larger.

    Args:
        head: The weight, `[V', R]`.
        rank: At most R.
    """
    precise = head.double()
    directions = torch.linalg.eigh(precise.T @ precise).eigenvectors[:, -rank:]  # [R, rank]
    return directions.T.to(head.dtype), (precise @ directions).to(head.dtype)
