"""How far the next step drafts, and whether it drafts at all, by what became of the drafts of the last steps."""

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


# Time of a step with drafts, in steps without, by type of device: 1.1 to 1.4 on an H200 with a bf16 8B model from 1 to
# 64 rows, 1.8 for the boxed pair on two cores. It is a constant, and no measurement, so that what a call writes in half
# precision does not depend on the load of the machine.
STEP_COSTS = {"cuda": 1.25, "cpu": 1.5}

# Of that on a GPU, what verifies a tree. Drafting there is reading weights, so it adds the bytes that it reads in those
# of a forward: 0.1 for a small drafter, 0.7 for three steps of an MTP layer and the whole head beside 16 layers.
VERIFY_COST = 1.1

# Tokens that a step must gain for each row, drafts copied from its text and one, for these to be worth their nodes.
TEXT_GAIN = 1.1

WINDOW = 32  # rows of steps that are looked back on, at least
FEWEST = 6  # rows of steps by which drafts are judged at first
FEWEST_AFTER_PAUSE = 2  # the same after a pause, in which they have gained too little before
FIRST_PAUSE, LONGEST_PAUSE = 16, 128  # steps without drafts; each pause is twice as long as the one before it


def step_cost(device: str, draft_bytes: int, forward_bytes: int) -> float:
    """Return what a step with drafts is taken to cost, in steps without.

    Args:
        device: Type of the device.
        draft_bytes: Bytes of the weights that a draft reads.
        forward_bytes: Bytes of the weights that a forward of the target reads.
    """
    if device == "cpu":  # small weights stay in its caches
        return STEP_COSTS["cpu"]
    return max(STEP_COSTS["cuda"], VERIFY_COST + draft_bytes / forward_bytes)


class DraftGain:
    """Lets steps pause drafting while it gains less than it costs, and try again from time to time.

    What is decided follows from the tokens of earlier steps alone, never from a clock.
    """

    def __init__(self, cost: float):
        """Begin with drafts. cost: time of a step with drafts, in steps without."""
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
        """Take note of a step with drafts: how many rows took some, at least 1, and how many tokens these gained."""
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


def draft_gains(costs: Mapping[int, float | None]) -> dict[int, DraftGain | None]:
    """Return what decides which steps of each size draft; sizes of one cost share what they have seen.

    Args:
        costs: Time of a step with drafts, in steps without, by size; None for a size whose steps all draft.
    """
    gains = {cost: DraftGain(cost) for cost in costs.values() if cost is not None}
    return {size: None if cost is None else gains[cost] for size, cost in costs.items()}
