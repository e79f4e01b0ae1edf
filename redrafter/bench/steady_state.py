"""Many prompts in one call: the speed while others take the places of texts that have ended."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from redrafter.measure.stopwatch import Stopwatch
from redrafter.measure.workload import Workload

__all__ = ["QueueSpeed", "SteadyState", "measure_steady_state", "steady_rate"]

Arrival = tuple[float, int, int]  # seconds from the call, row, and how many tokens it gained


@dataclass(frozen=True)
class QueueSpeed:
    """The speed of one call with more prompts than rows.

    Attributes:
        tokens_per_second: New tokens of all texts per second, prefill included.
        steady_tokens_per_second: The same from when all rows have begun until the last text begins; None where no text
            had to wait.
        tokens_per_step: New tokens of a text per step.
    """

    tokens_per_second: float
    steady_tokens_per_second: float | None
    tokens_per_step: float


@dataclass(frozen=True)
class SteadyState:
    """Plain and speculative decoding of one call with more prompts than rows.

    Attributes:
        batch_size: Rows decoded at once.
        prompts: Prompts of the call.
        plain: Speed of plain decoding.
        speculative: Speed of speculative decoding.
    """

    batch_size: int
    prompts: int
    plain: QueueSpeed
    speculative: QueueSpeed

    @property
    def speedup(self) -> float:
        """Speed of speculative decoding over that of plain decoding, of the whole call."""
        return self.speculative.tokens_per_second / self.plain.tokens_per_second


class _Arrivals:
    """A streamer that notes when each row gains how many tokens."""

    def __init__(self, watch: Stopwatch):
        self._watch = watch
        self.arrivals: list[Arrival] = []

    def put_step(self, row: int, tokens: Sequence[int], accepted: int, ended: bool) -> None:
        """Note the tokens of a row; see `StepStreamer`."""
        self.arrivals.append((self._watch.elapsed(), row, len(tokens)))

    def end(self) -> None:
        """Do nothing; see `StepStreamer`."""


def steady_rate(arrivals: Sequence[Arrival], rows: int) -> float | None:
    """Return tokens per second from when `rows` texts have begun until the last text begins.

    Args:
        arrivals: When each row gained how many tokens, in order.
        rows: Rows decoded at once.

    Returns:
        The rate; None where no text begins after the first `rows` ones.
    """
    begun: dict[int, float] = {}
    for seconds, row, _ in arrivals:
        begun.setdefault(row, seconds)
    begins = sorted(begun.values())
    if len(begins) <= rows or begins[-1] <= begins[rows - 1]:
        return None
    first, last = begins[rows - 1], begins[-1]
    return sum(count for seconds, _, count in arrivals if first < seconds <= last) / (last - first)


def measure_steady_state(work: Workload, rows: int, waves: int) -> SteadyState:
    """Decode `waves` times as many prompts as rows in one call, plainly and speculatively.

    Each way is run once before it is measured, so that nothing is captured in the measured call.

    Args:
        work: The workload.
        rows: Rows decoded at once.
        waves: Prompts of the call, as a multiple of `rows`.
    """
    engine, options = work.engine, work.engine.options
    prompts = [work.prompts[index % len(work.prompts)] for index in range(rows * waves)]
    engine.options = replace(options, max_batch_size=rows)
    try:
        plain, speculative = (_measure(work, prompts, rows, way) for way in (False, True))
    finally:
        engine.options = options
    return SteadyState(rows, len(prompts), plain, speculative)


def _measure(work: Workload, prompts: Sequence[Sequence[int]], rows: int, speculate: bool) -> QueueSpeed:
    for _ in range(2):
        run, streamer = work.streamed(prompts, speculate, _Arrivals)
    return QueueSpeed(run.count / run.seconds, steady_rate(streamer.arrivals, rows), run.stats.tokens_per_step)
