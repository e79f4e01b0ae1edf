"""When a step reads prompts: at once, or later together with prompts that are expected to arrive.

A captured step reads prompts into a buffer of a fixed size, and computes the buffer's padding too. Where the products
of a step are compute-bound, a few prompts that each arrive in a step of their own cost several times as much as the
same prompts in one step. A prompt that waits leaves its row idle, which costs the tokens of the row.
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

    def waits(self, prompts: int, rows: int, step_tokens: int, padded: int) -> bool:
        """Return whether the next step reads none of the prompts that wait.

        Args:
            prompts: Number of prompts that wait; their tokens leave a part of the largest buffer empty.
            rows: Rows that decode in the step.
            step_tokens: Nodes of the step's trees.
            padded: Size of the buffer that the prompts need, in tokens.
        """
        if rows and self.waited < MOST_STEPS:
            step = time_at(ASSUMED_STEPS["cuda"], step_tokens)
            saved = self.arrivals * (time_at(ASSUMED_STEPS["cuda"], step_tokens + padded) - step)
            if saved > MARGIN * step * prompts / rows:
                self.waited += 1
                return True
        self.waited = 0
        return False
