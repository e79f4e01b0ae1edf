"""The first stage of a head in two stages: a low-rank product proposes ids, and the head scores those alone.

At every level of a search the head of a drafter is read whole: with 128,256 ids it is most of the bytes of a draft, and
only a few of its logits matter. A product of low rank scores all ids roughly, in a fraction of the bytes. The C best of
each beam are candidates, and their exact logits come from the rows of the head that they name. What is lost is a token
that the rough scores do not rank among the best C; the target verifies what is drafted, so no text changes.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from redrafter.model.linear_layers import Float8Linear
from redrafter.tree.beam_search import Candidates

DraftScores = Callable[[Tensor, Tensor | None], Tensor]
"""Turns logits into scores: `scores(logits, ids)`, where `ids` are those of the target that the logits belong to.

Logits are `[B, w, V']` with ids `[V']`, or None where the drafter's are the target's, or both are `[B, w, C]`.
"""


class Shortlist(nn.Module):
    """Scores all ids roughly, from the input of the head that it stands before."""

    def __init__(self, width: int, rank: int, vocabulary: int):
        """Make a first stage of a rank for a head that reads `width` features, with random weights."""
        super().__init__()
        self.proj = nn.Linear(width, rank, bias=False)
        self.head = nn.Linear(rank, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return rough logits `[..., V']` for inputs of the head, `[..., R]`."""
        logits: Tensor = self.head(self.proj(x))
        return logits

    def choose(self, x: Tensor, head: nn.Linear, count: int, scores: DraftScores, names: Tensor | None) -> Candidates:
        """Score the likeliest ids of every beam with the head; all shapes are fixed, and nothing is read by the host.

        The rough scores have the target's noise too: what it draws may be unlikely by the logits alone.

        Args:
            x: Inputs of the head, `[B, w, R]`.
            head: The head.
            count: C, candidates of each beam; all ids where there are fewer.
            scores: How logits become scores.
            names: The target's id of each of the drafter's ids, `[V']` int64; None where they are the same.
        """
        rough = scores(self(x), names)
        ids = rough.topk(min(count, rough.shape[-1]), dim=-1, sorted=False).indices  # [B, w, C]
        exact = (head_rows(head, ids, x.dtype) @ x[..., None])[..., 0]
        return Candidates(scores(exact, ids if names is None else names[ids]), ids)


def head_rows(head: nn.Linear, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of a head's weight, FP8 or not, `[..., R]` for ids `[...]`."""
    if not isinstance(head, Float8Linear):
        return head.weight[ids]
    rows = head.weight.view(torch.uint8)[ids].view(head.weight.dtype)  # FP8 numbers cannot be indexed everywhere
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
