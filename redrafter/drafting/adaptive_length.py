"""How far a draft model drafts in the next step, from how its drafts were taken so far."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from redrafter.drafting.proposer import Proposer

__all__ = ["AdaptiveDraftLength"]

DECAY_PER_STEP = 0.9  # of what was seen, what still counts a step later
PRIOR_COUNTS = (3.0, 4.0)  # drafts kept and drafts judged, of a row of which nothing is known yet


class AdaptiveDraftLength:
    """The length that promises most tokens for the time, out of those that there are proposers for.

    A row whose drafts are kept with probability a each comes to 1 + a + ... + a^K tokens in a step that is K drafts
    deep and takes 1 + K * cost. Each row has its own a, judged by its own drafts, the latest ones most; the rows of a
    batch share a step, so their tokens are added up. Only drafts that were judged are looked at, so nothing that is
    sampled is biased.
    """

    def __init__(self, proposers: Mapping[int, "Proposer"], rows: int, cost: float):
        """proposers: by draft length. cost: what one more draft adds to a step, in steps that draft nothing."""
        self._proposers, self._cost = proposers, cost
        self._kept, self._judged = [PRIOR_COUNTS[0]] * rows, [PRIOR_COUNTS[1]] * rows
        self._active = [True] * rows

    def set_active(self, active: Sequence[bool]) -> None:
        """From now on only these rows count."""
        self._active = list(active)

    def next_proposer(self, levels: int, report: Sequence[Sequence[int]]) -> "Proposer":
        """The proposer of the next step, after one that drafted `levels` deep; report: per row its tokens and, last,
        how many drafts were kept. Of drafts behind the first one that was not, nothing is known."""
        for row, line in enumerate(report):
            if self._active[row] and line:
                self._kept[row] = DECAY_PER_STEP * self._kept[row] + line[-1]
                self._judged[row] = DECAY_PER_STEP * self._judged[row] + min(line[-1] + 1, levels)
        return self._proposers[max(self._proposers, key=self._worth)]

    def _worth(self, length: int) -> float:
        """Tokens for the time of a step that drafts nothing."""
        chances = [
            kept / judged for kept, judged, active in zip(self._kept, self._judged, self._active, strict=True) if active
        ]
        return sum(sum(chance**depth for depth in range(length + 1)) for chance in chances) / (1 + length * self._cost)
