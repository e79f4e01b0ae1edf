"""When a step reads prompts: at once, or later together with prompts that are expected to arrive.

A captured step reads prompts into a buffer of one of a few sizes, and computes the buffer's padding too. Where the
products of a step are compute-bound, that padding costs time, and prompts that are expected to arrive in the next steps
could take its place. A prompt that waits leaves its row idle, which costs the tokens of the row.
"""

from redrafter.drafting.estimates import ASSUMED_STEPS, time_at

SHARE = 1 / 64  # weight of a step in the running mean of arrivals
MARGIN = 1.5  # minimum ratio of the time that waiting is expected to save to what it costs
MOST_STEPS = 4  # maximum number of steps that a prompt waits for others


class PromptGathering:
    """Decides which steps read prompts, by the rate at which prompts arrive.

    The decision depends only on counts of rows and tokens, so all ranks of a model take the same one.

    Attributes:
        arrivals: Running mean of the number of prompts that arrive in a step, without those of the last one: a prompt
            must not wait because it has arrived itself.
        waited: Number of steps that the current prompts have waited for others.
    """

    def __init__(self) -> None:
        """Start without arrivals."""
        self.arrivals = 0.0
        self.waited = 0
        self._arrived = 0

    def count(self, arrived: int) -> None:
        """Count the prompts that arrived since the last step. Call this exactly once per step."""
        self.arrivals += SHARE * (self._arrived - self.arrivals)
        self._arrived = arrived

    def waits(self, prompts: int, rows: int, step_tokens: int, padded: int, filled: int = 0) -> bool:
        """Return whether the next step reads `filled` prompt tokens, and leaves the rest to later steps.

        Args:
            prompts: Number of prompts whose last tokens would be left.
            rows: Rows that decode in the step.
            step_tokens: Nodes of the step's trees.
            padded: Size of the buffer that all waiting prompts need, in tokens.
            filled: Size of the largest buffer that they fill; 0 for none.
        """
        if rows and (filled or self.waited < MOST_STEPS):
            step, least, most = (time_at(ASSUMED_STEPS["cuda"], step_tokens + read) for read in (0, filled, padded))
            if self.arrivals * (most - least) > MARGIN * step * prompts / rows:
                self.waited = 0 if filled else self.waited + 1
                return True
        self.waited = 0
        return False
