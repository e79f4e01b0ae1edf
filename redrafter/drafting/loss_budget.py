"""What is kept of drafts from call to call: their acceptance, and the budget that bounds the time that they lose."""

from collections import defaultdict
from copy import copy

from redrafter.drafting.estimates import QUALITY, AcceptanceEstimator

# `DraftLossBudget`, in units of the time of one undrafted step: its initial value, the maximum to which gains refill
# it, and the amount that each undrafted step adds. In a simulation where all drafts are rejected, a first call of 128
# tokens is 0.975 to 0.985 times as fast as without drafts where a drafted step takes the time of 1.3 to 4 (0.954 to
# 0.984 with an initial value of 3), and later calls 0.98 to 0.99 times. Less than 2 ends a good drafter's drafts after
# a few unlucky first steps.
ALLOWED, MOST_ALLOWED, ALLOWED_SHARE = 2.0, 3.0, 0.005
FEWEST = 5  # minimum number of drafted rows before the budget may judge that drafts do not pay
# Minimum and maximum number of steps between two retries of drafts that do not pay. The interval doubles with each
# retry, until a drafted step gains time.
RETRY, LONGEST_RETRY = 8, 128
MANY_ROWS = 32  # rows from which on drafts begin only for a clear gain, as the unluckiest row ends a call

# Drafts of a draft model: the decay of their counts per step, and the initial counts of accepted and judged ones.
DECAY_PER_STEP = 0.9
PRIOR_ACCEPTED, PRIOR_JUDGED = 3.0, 4.0


class DraftLossBudget:
    """Bounds the time that rejected drafts lose, relative to undrafted decoding.

    Drafts may lose the time of a step or two, plus a small part of the time of every undrafted step. Gains refill the
    budget. A few unlucky steps therefore do not stop drafting, while a drafter that keeps losing is skipped in most
    steps.

    Attributes:
        pays: Whether drafts are expected to pay.
        steps: Number of drafted steps so far.
    """

    def __init__(self) -> None:
        """Create the budget of drafts of which nothing is known."""
        self.pays = True
        self._left = ALLOWED  # remaining loss, in undrafted steps
        self.steps = 0
        self._rows = 0  # drafted rows so far
        self._retry = RETRY  # steps until the next retry
        self._waited = 0  # steps since the last retry

    def allows_drafts(self, rows: int, loss: float) -> bool:
        """Return whether the next step may draft. Call this exactly once per step.

        Args:
            rows: Rows of the step. A step of n rows gives as much evidence as n steps of one row, so a retry waits for
                at least n steps.
            loss: Time that the step loses if all of its drafts are rejected, in undrafted steps.
        """
        self._waited += 1
        if not self.would_allow(rows, loss):
            # A loss above the maximum is saved for too, or drafts that begin with a long prompt would never be retried.
            self._left = min(self._left + ALLOWED_SHARE, max(MOST_ALLOWED, loss))
            return False
        if not self.pays:
            self._waited = 0
            self._retry = min(2 * self._retry, LONGEST_RETRY)
        return True

    def would_allow(self, rows: int, loss: float) -> bool:
        """Return whether a step with these arguments may draft, without counting it as taken."""
        # Drafts that hardly pay lose about half of what they lose if all are rejected.
        return self._left >= loss / 2 and (self.pays or self._waited > max(self._retry, rows))

    def charge(self, loss: float) -> None:
        """Charge time that drafts took outside of their steps, in undrafted steps."""
        self._left -= loss

    def observe(self, rows: int, gained: float, *, pays: bool) -> None:
        """Record the outcome of a drafted step.

        Args:
            rows: Rows that took drafts.
            gained: Time that the step gained, in undrafted steps; negative for a loss.
            pays: Whether drafts are expected to pay in later steps.
        """
        self._left = min(self._left + gained, MOST_ALLOWED)
        self.steps += 1
        self._rows += rows
        self.pays = pays or self._rows < FEWEST
        if gained > 0:
            self._retry = RETRY
        if self.pays:
            self._waited = 0


class AcceptanceHistory:
    """Stores the acceptance of an engine's drafts across batches.

    Attributes:
        estimator: Estimates the accepted drafts of a search.
        copied: Running mean of the accepted drafts per row that only copying found, over steps that copy drafts in
            addition to a search.
        copied_alone: Running mean of the same count over all steps that copy drafts. It estimates the gain of steps
            that copy drafts without a search.
        kept, judged: Decayed counts of a draft model's accepted drafts, and of those that the target judged.
        budgets: Loss budgets, by the logarithm of the batch size.
    """

    def __init__(self, quality: float = QUALITY, copied: float = 0.0):
        """Create a history without observations.

        Args:
            quality: Initial quality of the drafter; see `AcceptanceEstimator`.
            copied: Initial value of `copied` and `copied_alone`.
        """
        self.estimator = AcceptanceEstimator(quality)
        self.copied = copied
        self.copied_alone = copied
        self.kept, self.judged = PRIOR_ACCEPTED, PRIOR_JUDGED
        self.budgets: dict[int, DraftLossBudget] = defaultdict(DraftLossBudget)

    def budget_for(self, size: int) -> DraftLossBudget:
        """Return the loss budget of a batch size, which batch sizes up to the same power of two share."""
        key, largest = (size - 1).bit_length(), MANY_ROWS.bit_length() - 1
        if key not in self.budgets and (known := [each for each in self.budgets if max(each, key) <= largest]):
            # Rows that end one by one pass through all sizes. With a loss at each, 8 rows were 0.83 times as fast as
            # without drafts where a drafted step takes the time of 4, in the first call of 64 tokens.
            self.budgets[key] = copy(self.budgets[min(known, key=lambda each: abs(each - key))])
        return self.budgets[key]
