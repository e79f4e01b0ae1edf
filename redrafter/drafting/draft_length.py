"""The length of a second model's drafts, and pauses of drafting. Both follow from what became of earlier drafts."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from redrafter.drafting.proposer import Proposer

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
        """Update the estimate of a row with a step whose tree had `levels` levels of drafts, `accepted` of which were.

        A step judges a row's accepted drafts and the first rejected one; nothing is known of the drafts after it.
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


# Tokens that a step must gain for each row, drafts copied from its text and one, for these to be worth their nodes.
TEXT_GAIN = 1.1

WINDOW = 32  # rows of steps that are looked back on, at least
FEWEST = 6  # rows of steps by which drafts are judged at first
FEWEST_AFTER_PAUSE = 2  # the same after a pause, in which they have gained too little before
FIRST_PAUSE, LONGEST_PAUSE = 16, 128  # steps without drafts; each pause is twice as long as the one before it


class Pause:
    """Steps without drafts, which are tried again after each pause, and come to longer ones while they do not pay."""

    def __init__(self, fewest: int, fewest_after: int):
        """Begin with drafts, which are judged by `fewest` rows of steps, and after a pause by `fewest_after`."""
        self._fewest, self._fewest_after, self._needed, self._rows = fewest, fewest_after, fewest, 0
        self._length, self._left = FIRST_PAUSE, 0

    @property
    def lasts(self) -> bool:
        """Tell whether the next step does without drafts."""
        return self._left > 0

    def skip(self) -> bool:
        """Decide whether the next step does without drafts. To be called once for each step."""
        lasts, self._left = self.lasts, max(self._left - 1, 0)
        return lasts

    @property
    def trying(self) -> bool:
        """Tell whether drafts are tried again after a pause, and not judged yet."""
        return not self.lasts and self._rows < self._needed < self._fewest

    def judge(self, rows: int, *, pays: bool, at_least: int = FIRST_PAUSE) -> bool:
        """Begin a pause if drafts do not pay, after a step in which so many rows took some; return whether it began.

        The pause is of `at_least` so many steps.
        """
        if self.lasts:
            return False  # the step was launched before the pause
        self._rows += rows
        if self._rows < self._needed:
            return False
        if pays:
            if self._rows >= self._fewest:
                self._needed, self._length = self._fewest, FIRST_PAUSE
            return False
        self._left = max(self._length, at_least)
        self._length = min(2 * self._left, LONGEST_PAUSE)
        self._needed, self._rows = self._fewest_after, 0
        return True


class DraftGain:
    """Lets steps pause drafting while it gains less than it costs, and try again from time to time.

    What is decided follows from the tokens of earlier steps alone, never from a clock.
    """

    def __init__(self, cost: float):
        """Begin with drafts. cost: time of a step with drafts, in steps without."""
        self._cost, self._pause = cost, Pause(FEWEST, FEWEST_AFTER_PAUSE)
        self._steps: deque[tuple[int, int]] = deque()  # rows and tokens of the last steps with drafts
        self._rows = self._tokens = 0  # their sums

    def should_draft(self) -> bool:
        """Decide whether the next step drafts. To be called once for each step."""
        return not self._pause.skip()

    def observe(self, rows: int, tokens: int) -> None:
        """Take note of a step with drafts: how many rows took some, at least 1, and how many tokens these gained."""
        if self._pause.lasts:
            return  # it was launched before the pause
        self._steps.append((rows, tokens))
        self._rows, self._tokens = self._rows + rows, self._tokens + tokens
        while self._rows - self._steps[0][0] >= WINDOW:
            old_rows, old_tokens = self._steps.popleft()
            self._rows, self._tokens = self._rows - old_rows, self._tokens - old_tokens
        if self._pause.judge(rows, pays=self._tokens >= self._cost * self._rows):
            self._steps.clear()
            self._rows = self._tokens = 0
