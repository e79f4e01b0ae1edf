"""What steps take on this machine: assumed costs, which the first few steps of each kind correct.

Nothing runs only to be measured: a large model's step may take seconds. After a few steps of a kind its time stays as
it is, so that what is drafted soon follows from the costs and the tokens alone.
"""

from collections import defaultdict
from collections.abc import Callable
from math import log2

from redrafter.drafting.proposer import Proposer
from redrafter.drafting.step_costs import StepCosts

Clock = Callable[[], float]

SAMPLES = 4  # steps of a kind that are timed, of which the shortest counts: others were stretched by other work
ENOUGH = 2  # of these, before they count


class StepTimes:
    """The time of steps by their rows and proposers, as `StepCosts.of` gives it, with what was measured of them.

    A kind of step that was not timed yet costs as much more than a step without drafts as `StepCosts` has it, times
    what that was wrong by for the kind most like it.

    Attributes:
        clock: Gives the time in seconds; None to measure nothing.
    """

    def __init__(self, assumed: StepCosts, plain: Proposer, clock: Clock | None):
        """Begin with costs that are assumed, and with the proposer that drafts nothing."""
        self._assumed, self._plain, self.clock = assumed, plain, clock
        self._samples: dict[tuple[int, int], list[float]] = defaultdict(list)  # by rows and id of the proposer
        self._timed: dict[int, Proposer] = {}  # by id
        self._excess: dict[tuple[int, int], tuple[float, float]] = {}  # over a plain step: assumed, and measured

    def wants(self, rows: int, proposer: Proposer, count: int = SAMPLES) -> bool:
        """Return whether fewer than `count` steps of this kind were timed, where any are."""
        return self.clock is not None and len(self._samples[rows, id(proposer)]) < count

    def observe(self, rows: int, proposer: Proposer, seconds: float) -> None:
        """Record the time of a step."""
        self._timed[id(proposer)] = proposer
        self._samples[rows, id(proposer)].append(seconds)
        if self.wants(rows, self._plain, ENOUGH):
            return
        without, plain = min(self._samples[rows, id(self._plain)]), self._assumed.of(self._plain, rows)
        for key, each in self._timed.items():
            if each is not self._plain and not self.wants(rows, each, ENOUGH):
                measured = min(self._samples[rows, key]) / without if without > 0 else 1.0
                self._excess[rows, key] = self._assumed.of(each, rows) / plain - 1, measured - 1

    def of(self, proposer: Proposer, rows: int, more: int = 0) -> float:
        """Return the time of a step of `rows` rows that also reads `more` tokens of prompts, in the costs' unit."""
        assumed = self._assumed.of(proposer, rows, more)
        if proposer is self._plain or not self._excess:
            return assumed
        alone, plain = self._assumed.of(proposer, rows), self._assumed.of(self._plain, rows)
        excess = alone / plain - 1
        measured = self._excess.get((rows, id(proposer)))
        if measured is None:
            likest = min(self._excess, key=lambda key: (abs(log2(key[0] / rows)), abs(self._excess[key][0] - excess)))
            expected, found = self._excess[likest]
            measured = excess, excess * max(found, 0.0) / max(expected, 1e-3)
        return assumed - alone + plain * (1 + measured[1])
