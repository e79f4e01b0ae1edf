"""The decision to pause drafting while it gains too little, made from the tokens of the last steps."""

from collections import deque

__all__ = ["STEP_COSTS", "DraftGain"]

# Time of a step with drafts, in steps without, by type of device: 1.1 to 1.4 on an H200 with a bf16 8B model from 1 to
# 64 rows, 1.8 for the boxed pair on two cores. It is a constant, and no measurement, so that what a call writes in half
# precision does not depend on the load of the machine.
STEP_COSTS = {"cuda": 1.25, "cpu": 1.5}

WINDOW = 32  # rows of steps that are looked back on, at least
FEWEST = 6  # rows of steps by which drafts are judged at first
FEWEST_AFTER_PAUSE = 2  # the same after a pause, in which they have gained too little before
FIRST_PAUSE, LONGEST_PAUSE = 16, 128  # steps without drafts; each pause is twice as long as the one before it


class DraftGain:
    """Lets steps pause drafting while it gains less than it costs, and try again from time to time.

    What is decided follows from the tokens of earlier steps alone, never from a clock.
    """

    def __init__(self, cost: float):
        """Begin with drafts.

        Args:
            cost: Time of a step with drafts, in steps without.
        """
        self._cost = cost
        self._steps: deque[tuple[int, int]] = deque()  # rows and tokens of the last steps with drafts
        self._rows = self._tokens = 0  # their sums
        self._fewest, self._pause, self._paused = FEWEST, FIRST_PAUSE, 0

    def should_draft(self) -> bool:
        """Decide whether the next step drafts. To be called once for each step."""
        if self._paused:
            self._paused -= 1
            return False
        return True

    def observe(self, rows: int, tokens: int) -> None:
        """Take note of a step with drafts.

        Args:
            rows: Rows that took drafts, at least 1.
            tokens: Tokens that these gained.
        """
        if self._paused:
            return  # it was launched before the pause
        self._steps.append((rows, tokens))
        self._rows, self._tokens = self._rows + rows, self._tokens + tokens
        while self._rows - self._steps[0][0] >= WINDOW:
            old_rows, old_tokens = self._steps.popleft()
            self._rows, self._tokens = self._rows - old_rows, self._tokens - old_tokens
        if self._rows < self._fewest:
            return
        if self._tokens >= self._cost * self._rows:
            if self._rows >= FEWEST:
                self._fewest, self._pause = FEWEST, FIRST_PAUSE
            return
        self._paused, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        self._fewest = FEWEST_AFTER_PAUSE
        self._steps.clear()
        self._rows = self._tokens = 0
