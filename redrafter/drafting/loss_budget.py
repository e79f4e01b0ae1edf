"""The budget that bounds the time that rejected drafts lose."""

# `DraftLossBudget`, in units of the time of one undrafted step: its initial and maximum value, and the amount that each
# undrafted step adds.
ALLOWED, ALLOWED_SHARE = 3.0, 0.01
FEWEST = 5  # minimum number of drafted rows before the budget may judge that drafts do not pay
# Minimum and maximum number of steps between two retries of drafts that do not pay. The interval doubles with each
# retry, until a drafted step gains time.
RETRY, LONGEST_RETRY = 8, 128
MANY_ROWS = 32  # rows from which on one step is evidence enough, so that a first one which may lose much is not taken


class DraftLossBudget:
    """Bounds the time that rejected drafts lose, relative to undrafted decoding.

    Drafts may lose the time of a few steps, plus a small part of the time of every undrafted step. Gains refill the
    budget. A few unlucky steps therefore do not stop drafting, while a drafter that keeps losing is skipped in most
    steps.

    Attributes:
        pays: Whether drafts are expected to pay.
        steps: Number of drafted steps so far.
    """

    def __init__(self) -> None:
        """Create a full budget."""
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
        if self._left > 0 and self.pays and (self.steps or rows < MANY_ROWS or self._left >= loss):
            return True
        if self._waited > max(self._retry, rows) and self._left >= loss:
            self._waited = 0
            self._retry = min(2 * self._retry, LONGEST_RETRY)
            return True
        self._left = min(self._left + ALLOWED_SHARE, ALLOWED)
        return False

    def observe(self, rows: int, gained: float, *, pays: bool) -> None:
        """Record the outcome of a drafted step.

        Args:
            rows: Rows that took drafts.
            gained: Time that the step gained, in undrafted steps; negative for a loss.
            pays: Whether drafts are expected to pay in later steps.
        """
        self._left = min(self._left + gained, ALLOWED)
        self.steps += 1
        self._rows += rows
        self.pays = pays or self._rows < FEWEST
        if gained > 0:
            self._retry = RETRY
        if self.pays:
            self._waited = 0
