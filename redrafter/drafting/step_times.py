"""Times of decoding steps: assumed or measured once, then corrected by the times of the steps that an engine takes."""

import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import exp, log, log2
from typing import NamedTuple

from redrafter.drafting.proposer import Proposer, step_tokens

Curve = tuple[tuple[int, float], ...]
"""Pairs of a number and a time, in ascending order of the number, that define a piecewise linear function."""

# The time of a forward pass by its tokens, relative to one token, before any step was timed: a bf16 8B model on an
# H200, where 1/26/64/128/208/256 tokens take 3.97/4.04/4.24/4.64/6.0/7.3 ms, and the boxed pair on one CPU core, whose
# weights stay in its caches.
FORWARD: Mapping[str, Curve] = {
    "cuda": ((1, 1.0), (128, 1.15), (256, 1.75)),
    "cpu": ((1, 1.0), (12, 1.06), (32, 1.2), (64, 1.48), (128, 2.0), (256, 3.2)),
}
# The same on a CPU for weights of `LARGE_BYTES` or more, by the bytes of a weight: SmolLM2-135M on one core. In
# float32, matrix products of two and three tokens take longer than those of four. 1 is for groups of 4 and 8 bits, of
# any size: with AVX2 they are computed for longer than they are read, and in all as long as so many bytes in float32.
LARGE_FORWARD: Mapping[int, Curve] = {
    4: ((1, 1.0), (2, 1.4), (4, 1.4), (6, 1.6), (12, 1.8), (26, 2.6), (64, 5.0), (256, 18.0)),
    2: ((1, 1.0), (2, 1.02), (4, 1.18), (6, 1.2), (12, 1.45), (26, 2.2), (64, 4.5), (256, 16.0)),
    1: ((1, 1.0), (2, 1.27), (3, 1.45), (4, 1.77), (6, 2.5), (12, 4.0), (26, 7.7), (64, 19.0), (256, 65.0)),
}
LARGE_BYTES = 2e8
# The time that a level of a search adds on a CPU, by the beams of all rows: the boxed pair on one core.
LEVEL: Curve = ((1, 0.06), (40, 0.19), (160, 0.53))

# Steps of a kind after which its time is known, as the first one may load code, and those of which the fastest counts.
ENOUGH, FASTEST_OF = 2, 8
# Weight of a further step in the running mean of its kind's time, and the most by which it changes the logarithm: one
# step in some is stretched by other programs.
WEIGHT, MOST_CHANGE = 0.1, 0.025
# Factor between measured and assumed times of undrafted steps above which the costs were measured under another load of
# the device, and the steps of a kind after which it is judged.
WRONG, ENOUGH_TO_DOUBT = 1.5, 16
# Corrections after which the time of a kind may be that of another load of the device: at most, and for each of its
# steps, as the first few may all have been slow.
OUTDATED, OUTDATED_BY_STEP = 256, 16
# Of the steps of several ranks one in so many is timed, as ranks exchange its time; a prime, so that kinds of steps
# that alternate are all timed.
SHARED_EVERY = 17


@dataclass(frozen=True)
class StepCosts:
    """Models the time of steps, in an arbitrary unit.

    Attributes:
        forward: Time of a step without a search, by the tokens of its forward pass.
        level: Time that each level of a search adds, by the beams of all rows.
        reading: Time that each token in the KV cache adds to any step.
    """

    forward: Curve
    level: Curve
    reading: float = 0.0

    def __post_init__(self) -> None:
        # More work never takes less time. Where a measured time falls, the earlier times are too long, because other
        # programs ran at the same time.
        for name in ("forward", "level"):
            curve: Curve = getattr(self, name)
            times = [*accumulate((float(time) for _, time in reversed(curve)), min)][::-1]
            object.__setattr__(self, name, tuple(zip((number for number, _ in curve), times, strict=True)))

    @classmethod
    def assumed(cls, device: str, draft: float, forward: float, depth: int, itemsize: int = 2) -> "StepCosts":
        """Return the costs to assume before any step was timed.

        Args:
            device: Type of the device.
            draft: Bytes of the weights that a search of `depth` levels reads.
            forward: Bytes of the weights that a forward pass of the target reads.
            depth: Levels of the search.
            itemsize: Bytes of a weight; 1 for groups of 4 or 8 bits.
        """
        share = draft / forward / depth
        if device != "cpu":
            return cls(FORWARD["cuda"], ((1, share),))
        large, grouped = LARGE_FORWARD[min(itemsize, 4)], itemsize == 1
        much = 1.0 if grouped else min(forward / LARGE_BYTES, 1.0)
        drafter = LARGE_FORWARD[4] if grouped else large  # drafters and draft models are in float32 then
        level = tuple((n, share * time) for n, time in drafter)
        return cls(_between(FORWARD["cpu"], large, much), _between(LEVEL, level, much))

    def time_of(self, proposer: Proposer, rows: int, more: int = 0, cached: int = 0) -> float:
        """Return the time of a step of `rows` rows that prefills `more` prompt tokens and has `cached` in the cache."""
        search = proposer.without_text or proposer
        time = time_at(self.forward, step_tokens(proposer, rows) + more) + self.reading * cached
        return time + search.depth * time_at(self.level, rows * search.beams) if search.beams else time


def time_at(curve: Curve, number: int) -> float:
    """Return the time at a number: constant before the first point, linear between points and after the last one."""
    if number <= curve[0][0] or len(curve) == 1:
        return curve[0][1]
    after = min(bisect_right(curve, number, key=lambda point: point[0]), len(curve) - 1)
    (low, before), (high, later) = curve[after - 1], curve[after]
    return before + (later - before) * (number - low) / (high - low)


def _between(first: Curve, second: Curve, share: float) -> Curve:
    """Return the linear interpolation between two curves: the first for `share` 0, the second for 1."""
    numbers = sorted({number for number, _ in (*first, *second)})
    return tuple((n, (1 - share) * time_at(first, n) + share * time_at(second, n)) for n in numbers)


class StepKind(NamedTuple):
    """Identifies a kind of step.

    Attributes:
        rows: Batch size of the step.
        proposer: Its proposer.
        sampled: Whether any row samples: noise then takes time for each level of drafts.
    """

    rows: int
    proposer: Proposer
    sampled: bool


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
        if self.count < FASTEST_OF:
            self.mean = min(self.mean, ratio) if self.count else ratio
        elif now - self.last >= OUTDATED:
            self.mean = (self.mean + ratio) / 2
        else:
            self.mean += min(max(WEIGHT * (ratio - self.mean), -MOST_CHANGE), MOST_CHANGE)
        self.count, self.last = self.count + 1, now

    def is_unknown(self, now: int) -> bool:
        """Return whether too few steps were timed lately."""
        return self.count < ENOUGH or now - self.last >= min(OUTDATED, OUTDATED_BY_STEP * self.count)


class StepTimes:
    """Estimates the time of steps by `StepCosts`, corrected by the measured times of each kind of step.

    The excess of a kind of step is its time minus the time of an undrafted step, relative to the latter. The excess of
    a kind that was not timed is assumed, and scaled by the ratio of measured to assumed excess of the most similar kind
    that was. No step runs only for a measurement, since a step of a large model may take seconds.

    Attributes:
        assumed: Costs to assume for kinds of steps that were not timed.
        undrafted: The proposer that drafts nothing.
        clock: Returns the time in seconds, of steps on a CPU.
        corrected_every: One in so many steps is reported to `correct`; 0 for none.
        on_wrong: Called once where undrafted steps take more than `WRONG` times the assumed time, or less than one part
            in it; None to call nothing.
    """

    on_wrong: Callable[[], object] | None = None

    def __init__(
        self,
        assumed: StepCosts,
        undrafted: Proposer,
        clock: Callable[[], float] = time.perf_counter,
        *,
        corrected_every: int = 0,
    ):
        self.assumed, self.undrafted, self.clock, self.corrected_every = assumed, undrafted, clock, corrected_every
        self._ratios: dict[StepKind, RunningRatio] = defaultdict(RunningRatio)
        self._excess: dict[StepKind, tuple[float, float]] = {}  # assumed and measured excess
        self._corrections = self._steps = 0
        self._seconds_to_read = 0.0  # of a token, in a draft model

    @property
    def measured(self) -> bool:
        """Return whether the time of any drafted step is known."""
        return bool(self._excess)

    def lacks(self, rows: int, proposer: Proposer, *, sampled: bool) -> bool:
        """Return whether steps of this kind are to be timed, but too few were lately to compare others with them."""
        return self.corrected_every > 0 and self._is_unknown(StepKind(rows, proposer, sampled))

    def due(self, rows: int, proposer: Proposer, *, sampled: bool) -> bool:
        """Return whether the next step, which is of this kind, is to be reported to `correct`."""
        if not self.corrected_every:
            return False
        self._steps += 1
        return self._steps % self.corrected_every == 0 or self._is_unknown(StepKind(rows, proposer, sampled))

    def _is_unknown(self, kind: StepKind) -> bool:
        return kind not in self._ratios or self._ratios[kind].is_unknown(self._corrections)

    def correct(self, rows: int, proposer: Proposer, seconds: float, *, cached: int = 0, sampled: bool = False) -> None:
        """Correct the estimates by the measured time of a step, which prefilled nothing.

        Args:
            rows: Batch size of the step.
            proposer: Proposer of the step.
            seconds: Its time.
            cached: Tokens of all rows in the KV cache.
            sampled: Whether any row sampled.
        """
        self._corrections += 1
        ratio = log(max(seconds, 1e-9) / max(self.assumed.time_of(proposer, rows, cached=cached), 1e-9))
        times = self._ratios[StepKind(rows, proposer, sampled)]
        times.add(ratio, self._corrections)
        if proposer is self.undrafted and times.count >= ENOUGH_TO_DOUBT and abs(times.mean) > log(WRONG):
            forget, self.on_wrong = self.on_wrong, None
            if forget is not None:
                forget()
        alike = {kind: each.mean for kind, each in self._ratios.items() if (kind.rows, kind.sampled) == (rows, sampled)}
        # A draft model on a GPU takes no undrafted step, so its drafts are compared with each other.
        unit = alike.pop(StepKind(rows, self.undrafted, sampled), None)
        unit = min(alike.values(), default=0.0) if unit is None else unit
        for kind, mean in alike.items():
            expected = self.assumed.time_of(kind.proposer, rows) / self.assumed.time_of(self.undrafted, rows)
            self._excess[kind] = expected - 1, exp(mean - unit) * expected - 1

    def correct_reading(self, tokens: int, seconds: float) -> None:
        """Take the time that a draft model took to read tokens; the shortest counts, as short reads take longest."""
        each = seconds / max(tokens, 1)
        self._seconds_to_read = min(self._seconds_to_read or each, each)

    def time_to_read(self, tokens: int) -> float:
        """Return the seconds that a draft model takes to read tokens; 0 before it was measured."""
        return tokens * self._seconds_to_read

    def undrafted_steps(self, seconds: float, rows: int, *, sampled: bool) -> float | None:
        """Return how many undrafted steps of `rows` rows take so many seconds; None before one was measured."""
        kind = StepKind(rows, self.undrafted, sampled)
        if kind not in self._ratios:
            return None
        return seconds / (self.assumed.time_of(self.undrafted, rows) * exp(self._ratios[kind].mean))

    def time_of(self, proposer: Proposer, rows: int, more: int = 0, cached: int = 0, *, sampled: bool = False) -> float:
        """Return the estimated time of a step, in the unit of the costs.

        Args:
            proposer: Proposer of the step.
            rows: Rows of the step.
            more: Prompt tokens that the step prefills.
            cached: Tokens of all rows in the KV cache.
            sampled: Whether any row samples.
        """
        assumed = self.assumed.time_of(proposer, rows, more, cached)
        if proposer is self.undrafted or not self._excess:
            return assumed
        undrafted = self.assumed.time_of(self.undrafted, rows)
        excess = self.assumed.time_of(proposer, rows) / undrafted - 1
        measured = self._excess.get(StepKind(rows, proposer, sampled))
        if measured is None:

            def difference(kind: StepKind) -> tuple[float, float]:
                return abs(log2(kind.rows / rows)) + (kind.sampled != sampled), abs(self._excess[kind][0] - excess)

            expected, found = self._excess[min(self._excess, key=difference)]
            measured = excess, excess * max(found, 0.0) / max(expected, 1e-3)
        return assumed + undrafted * (measured[1] - excess)
