"""Estimates of step times: assumed or measured costs, corrected by the times of the steps that an engine takes."""

import time
from collections import defaultdict
from collections.abc import Callable
from math import exp, log, log2
from typing import NamedTuple

from redrafter.drafting.estimates import StepCosts
from redrafter.drafting.proposer import Proposer

ENOUGH = 2  # minimum number of timed steps of a kind before their time counts

# `StepTimes.correct`: the weight of a step in the running mean of its kind, the largest change of the logarithm that
# one step makes, and the number of corrections after which the mean of a kind is outdated.
CORRECTION_WEIGHT, MOST_CHANGE, OUTDATED = 0.1, 0.25, 256
# Of the steps of several ranks, one in so many is reported, as ranks exchange its time; a prime, so that kinds of steps
# that alternate are all reported.
SHARED_EVERY = 17


class StepKind(NamedTuple):
    """Identifies a kind of step.

    Attributes:
        rows: Batch size of the step.
        proposer: Id of its proposer.
        sampled: Whether any row samples: noise then takes time for each level of drafts.
    """

    rows: int
    proposer: int
    sampled: bool = False


class RunningRatio:
    """Running mean of the logarithm of measured to assumed times of a kind of step.

    Attributes:
        count: Number of steps.
        mean: The mean.
        last: Number of the last correction, of any kind, that changed it.
    """

    def __init__(self) -> None:
        self.count, self.mean, self.last = 0, 0.0, 0

    def add(self, ratio: float, now: int) -> None:
        """Add the logarithm of a ratio, measured by correction number `now`."""
        if self.count < ENOUGH:  # the shortest counts
            self.mean = min(self.mean, ratio) if self.count else ratio
        else:
            weight = max(CORRECTION_WEIGHT, min((now - self.last) / OUTDATED, 1.0) / 2)
            most = MOST_CHANGE * (weight / CORRECTION_WEIGHT)
            self.mean += weight * min(max(ratio - self.mean, -most), most)
        self.count, self.last = self.count + 1, now


class StepTimes:
    """Estimates the time of steps by `StepCosts`, corrected by the measured times of each kind of step.

    The excess of a kind of step is its time minus the time of an undrafted step, relative to the latter. The estimated
    excess of a kind without measurements is its assumed excess, scaled by the ratio of measured to assumed excess of
    the most similar measured kind.

    No step runs only for a measurement, since a step of a large model may take seconds. `correct` follows the times of
    the steps for which `due` asks: costs that were measured once may be those of a device that another program used,
    and none include the noise of sampling.

    Attributes:
        assumed: Costs to assume for kinds of steps that were not measured.
        plain: The proposer that drafts nothing.
        clock: Returns the time in seconds, of steps on a CPU.
        corrected_every: One in so many steps is reported to `correct`; 0 for none.
    """

    def __init__(
        self,
        assumed: StepCosts,
        plain: Proposer,
        clock: Callable[[], float] = time.perf_counter,
        *,
        corrected_every: int = 0,
    ):
        """Create the estimates.

        Args:
            assumed: Costs to assume for kinds of steps that were not measured.
            plain: The proposer that drafts nothing.
            clock: Returns the time in seconds, of steps on a CPU.
            corrected_every: One in so many steps is reported to `correct`; 0 for none.
        """
        self.assumed = assumed
        self.plain = plain
        self.clock = clock
        self.corrected_every = corrected_every
        self._timed: dict[int, Proposer] = {}  # by id
        self._excess: dict[StepKind, tuple[float, float]] = {}  # assumed and measured excess
        self._ratios: dict[StepKind, RunningRatio] = defaultdict(RunningRatio)
        self._corrections = self._steps = 0
        self._last: tuple[StepKind, float] | None = None  # the last corrected kind, and its seconds
        self._seconds_to_read = 0.0  # of a token, in a draft model

    @property
    def measured(self) -> bool:
        """Whether the excess of any kind of step was measured."""
        return bool(self._excess)

    def lacks_plain(self, rows: int, *, sampled: bool) -> bool:
        """Return whether `correct` has seen too few undrafted steps lately to correct the estimates of drafted ones."""
        return self.corrected_every > 0 and self._is_unknown(StepKind(rows, id(self.plain), sampled))

    def due(self, rows: int, proposer: Proposer, *, sampled: bool) -> bool:
        """Return whether the next step, which is of this kind, is to be reported to `correct`."""
        if not self.corrected_every:
            return False
        self._steps += 1
        return self._steps % self.corrected_every == 0 or self._is_unknown(StepKind(rows, id(proposer), sampled))

    def _is_unknown(self, kind: StepKind) -> bool:
        """Return whether too few steps of this kind were reported lately."""
        ratio = self._ratios[kind]
        return ratio.count < ENOUGH or self._corrections - ratio.last >= OUTDATED

    def correct(self, rows: int, proposer: Proposer, seconds: float, *, cached: int = 0, sampled: bool = False) -> None:
        """Correct the estimates by the measured time of a step, which prefilled nothing.

        Args:
            rows: Batch size of the step.
            proposer: Proposer of the step.
            seconds: Its time.
            cached: Tokens of all rows in the KV cache.
            sampled: Whether any row sampled.
        """
        self._timed[id(proposer)] = proposer
        self._corrections += 1
        expected = self.assumed.time_of(proposer, rows) + self.assumed.reading * cached
        kind = StepKind(rows, id(proposer), sampled)
        self._last = kind, seconds
        self._ratios[kind].add(log(max(seconds, 1e-9) / max(expected, 1e-9)), self._corrections)
        plain = self._ratios[StepKind(rows, id(self.plain), sampled)]
        changed = list(self._timed.items()) if proposer is self.plain else [(id(proposer), proposer)]
        for key, each in changed:
            kind = StepKind(rows, key, sampled)
            if each is self.plain or kind not in self._ratios or not plain.count:
                continue
            ratio = exp(self._ratios[kind].mean - plain.mean)
            # Other programs may stretch a step, but never shorten it: one below the undrafted time counts at once.
            if min(plain.count, self._ratios[kind].count) < ENOUGH and ratio >= 1:
                continue
            self._know(kind, each, ratio * self.assumed.time_of(each, rows) / self.assumed.time_of(self.plain, rows))

    def correct_reading(self, tokens: int, seconds: float) -> None:
        """Take the time that a draft model took to read tokens; the shortest counts, as short reads take longest."""
        each = seconds / max(tokens, 1)
        self._seconds_to_read = min(self._seconds_to_read or each, each)

    def time_to_read(self, tokens: int) -> float:
        """Return the seconds that a draft model takes to read tokens; 0 before it was measured."""
        return tokens * self._seconds_to_read

    def plain_steps(self, seconds: float, rows: int, *, sampled: bool) -> float | None:
        """Return how many undrafted steps of `rows` rows take so many seconds; None before one was measured."""
        plain = self._ratios[StepKind(rows, id(self.plain), sampled)]
        if not plain.count:
            return None
        return seconds / (self.assumed.time_of(self.plain, rows) * exp(plain.mean))

    def first_cost(self, rows: int, proposer: Proposer, *, sampled: bool) -> float | None:
        """Return the time of the step that was just timed, in undrafted steps, if its kind was not timed before.

        The assumed time of a kind may be far too low, and drafts lose most before it is corrected.
        """
        kind = StepKind(rows, id(proposer), sampled)
        if self._last is None or self._last[0] != kind or self._ratios[kind].count >= ENOUGH:
            return None
        return self.plain_steps(self._last[1], rows, sampled=sampled)

    def _know(self, kind: StepKind, proposer: Proposer, ratio: float) -> None:
        self._timed[kind.proposer] = proposer  # keeps the proposer alive, so that its id stays unique
        expected = self.assumed.time_of(proposer, kind.rows) / self.assumed.time_of(self.plain, kind.rows)
        self._excess[kind] = expected - 1, ratio - 1

    def time_of(self, proposer: Proposer, rows: int, more: int = 0, cached: int = 0, *, sampled: bool = False) -> float:
        """Return the estimated time of a step, in the unit of the costs.

        Args:
            proposer: Proposer of the step.
            rows: Rows of the step.
            more: Prompt tokens that the step prefills.
            cached: Tokens of all rows in the KV cache.
            sampled: Whether any row samples.
        """
        assumed = self.assumed.time_of(proposer, rows, more) + self.assumed.reading * cached
        if proposer is self.plain or not self._excess:
            return assumed
        alone, plain = self.assumed.time_of(proposer, rows), self.assumed.time_of(self.plain, rows)
        excess = alone / plain - 1
        measured = self._excess.get(StepKind(rows, id(proposer), sampled))
        if measured is None:

            def difference(kind: StepKind) -> tuple[float, float]:
                return abs(log2(kind.rows / rows)) + (kind.sampled != sampled), abs(self._excess[kind][0] - excess)

            expected, found = self._excess[min(tuple(self._excess), key=difference)]
            measured = excess, excess * max(found, 0.0) / max(expected, 1e-3)
        return assumed - alone + plain * (1 + measured[1])
