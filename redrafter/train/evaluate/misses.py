"""Why a step's first missed draft was missed, and where misses are: counts of tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

__all__ = [
    "MISSES",
    "Outcome",
    "Steps",
    "bucket_drafts",
    "classify",
    "count_misses",
    "describe_drafts",
    "rank_of",
    "tried_drafts",
]

NEAR = 2  # times the beams: a rank below is a near miss


class Outcome(IntEnum):
    """What ended a step: a miss of one of four classes, the end of the draft, or the end of the text."""

    OUTSIDE_HEAD = 0
    NEAR_MISS = 1
    WRONG_GUESS = 2
    NODE_BUDGET = 3
    ALL_ACCEPTED = 4
    TEXT_ENDED = 5


MISSES = tuple(outcome for outcome in Outcome if outcome < Outcome.ALL_ACCEPTED)


@dataclass(frozen=True)
class Steps:
    """S steps that decoding takes along texts.

    Attributes:
        text: Index of each step's text, `[S]` int64.
        pending: Position of its pending token in the text, `[S]` int64.
        left: Tokens of the text behind the pending one, `[S]` int64.
        accepted: Drafts that are accepted, `[S]` int64.
        searched: Drafts that would be accepted if all nodes of the search were verified, `[S]` int64.
        rank: Rank of the token behind the accepted drafts among all that the drafter knows, after the accepted drafts;
            0 for the one that it likes best, -1 where it does not know the token; `[S]` int64.
    """

    text: Tensor
    pending: Tensor
    left: Tensor
    accepted: Tensor
    searched: Tensor
    rank: Tensor


def rank_of(scores: Tensor, label: Tensor) -> Tensor:
    """Return how many scores `[A, V']` are above that of `label` `[A]` int64, `[A]`; -1 where the label is -1."""
    own = scores.gather(1, label.clamp(min=0)[:, None])
    return (scores > own).sum(dim=1).where(label >= 0, -1)


def classify(steps: Steps, beams: int, depth: int) -> Tensor:
    """Return the `Outcome` of each step, `[S]` int64: of the tests below, the last one that holds.

    Args:
        steps: The steps.
        beams: Beams W of the search.
        depth: Depth K of the search.
    """
    outcome = torch.full_like(steps.rank, Outcome.WRONG_GUESS)
    outcome[steps.rank < NEAR * beams] = Outcome.NEAR_MISS
    outcome[steps.searched > steps.accepted] = Outcome.NODE_BUDGET
    outcome[steps.rank < 0] = Outcome.OUTSIDE_HEAD
    outcome[steps.accepted == steps.left] = Outcome.TEXT_ENDED
    outcome[steps.accepted == depth] = Outcome.ALL_ACCEPTED
    return outcome


def count_misses(outcome: Tensor, accepted: Tensor, depth: int) -> Tensor:
    """Count the misses by depth and class.

    Args:
        outcome: `Outcome` of each step, `[S]` int64.
        accepted: Drafts that each step accepted, `[S]` int64.
        depth: Depth K of the search.

    Returns:
        `[K, len(MISSES)]` int64; entry d is of draft d + 1.
    """
    missed = outcome < len(MISSES)
    cell = accepted[missed] * len(MISSES) + outcome[missed]
    return cell.bincount(minlength=depth * len(MISSES)).view(depth, len(MISSES))


def tried_drafts(steps: Steps, depth: int) -> tuple[Tensor, Tensor]:
    """Return the drafts that the steps tried: those that are accepted and the first that is not.

    What is behind the end of a text is not tried.

    Args:
        steps: The steps.
        depth: Depth K of the search.

    Returns:
        The step of each of the D drafts, and its index in the draft from 0, `[D]` int64 each.
    """
    tried = (steps.accepted + 1).minimum(steps.left).clamp(max=depth)  # [S]
    step = torch.arange(len(tried)).repeat_interleave(tried)  # [D]
    return step, torch.arange(len(step)) - (tried.cumsum(0) - tried)[step]


def describe_drafts(steps: Steps, probabilities: Sequence[Tensor], depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Describe the drafts that the steps tried.

    Args:
        steps: The steps.
        probabilities: Probability that the base gave each token, `[T]` float32 for each text of T tokens.
        depth: Depth K of the search.

    Returns:
        For each of D drafts: the probability of the text's token at its place, `[D]` float32; the tokens before it,
        `[D]` int64; whether it was accepted, `[D]` bool.
    """
    step, draft = tried_drafts(steps, depth)
    position = steps.pending[step] + 1 + draft  # also the tokens before it
    lengths = torch.tensor([len(text) for text in probabilities])
    starts = lengths.cumsum(0) - lengths
    probability = torch.cat(list(probabilities))[starts[steps.text[step]] + position]
    return probability, position, draft < steps.accepted[step]


def bucket_drafts(value: Tensor, accepted: Tensor, bounds: Sequence[float]) -> Tensor:
    """Count the drafts by a value of theirs, and those that are accepted.

    Args:
        value: Value of each draft, `[D]`.
        accepted: Whether each draft is accepted, `[D]` bool.
        bounds: Lowest value of each bucket but the first, rising.

    Returns:
        Drafts and accepted drafts, `[len(bounds) + 1, 2]` int64.
    """
    edges, count = torch.tensor(bounds, dtype=torch.float32), len(bounds) + 1
    bucket = torch.bucketize(value.float(), edges, right=True)  # [D]
    return torch.stack([bucket.bincount(minlength=count), bucket[accepted].bincount(minlength=count)], dim=1)
