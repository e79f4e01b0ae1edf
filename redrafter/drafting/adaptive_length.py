"""The draft length of the next step, chosen by how many drafts were accepted so far."""

from collections.abc import Callable, Mapping, Sequence

from redrafter.drafting.proposer import Proposer

__all__ = ["AdaptiveDraftLength"]

DECAY_PER_STEP = 0.9  # weight of older drafts after each step
PRIOR_ACCEPTED, PRIOR_JUDGED = 3.0, 4.0  # drafts that a new row counts as accepted and as judged


class AdaptiveDraftLength:
    """Chooses the draft length that is expected to give most tokens per unit of time.

    A row whose drafts are each accepted with probability a gains 1 + a + ... + a^K tokens in a step that is K drafts
    deep and takes time 1 + K * cost. Each row has its own a, estimated from its own drafts, with more weight on the
    latest. The rows of a batch share a step, so their tokens are added up. Only drafts that have been judged count, so
    samples are not biased.
    """

    def __init__(self, proposers: Mapping[int, Proposer], rows: int, cost: Callable[[int], float]):
        """Begin with the prior for every row.

        Args:
            proposers: The proposers to choose from, by draft length.
            rows: Rows of the call, not all of which need step together.
            cost: Gives the time that one more draft adds to a step of so many rows, as a part of the time of a step
                without drafts.
        """
        self._proposers, self._cost = proposers, cost
        self._accepted, self._judged = [PRIOR_ACCEPTED] * rows, [PRIOR_JUDGED] * rows

    def observe(self, row: int, accepted: int, levels: int) -> None:
        """Update the estimate of a row with a step.

        A step judges a row's accepted drafts and the first rejected one; nothing is known of the drafts after it.

        Args:
            row: Index of the row.
            accepted: Number of drafts that were accepted.
            levels: Levels of drafts in the step's tree.
        """
        self._accepted[row] = DECAY_PER_STEP * self._accepted[row] + accepted
        self._judged[row] = DECAY_PER_STEP * self._judged[row] + min(accepted + 1, levels)

    def choose(self, rows: Sequence[int]) -> Proposer:
        """Return the proposer for the next step of these rows."""
        chances = [self._accepted[row] / self._judged[row] for row in rows]
        return self._proposers[max(self._proposers, key=lambda length: self._tokens_per_time(length, chances))]

    def _tokens_per_time(self, length: int, chances: Sequence[float]) -> float:
        """Return the expected tokens of rows with these chances in the time of a step without drafts."""
        tokens = sum(sum(chance**depth for depth in range(length + 1)) for chance in chances)
        return tokens / (1 + length * self._cost(len(chances)))
