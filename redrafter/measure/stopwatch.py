"""Wall-clock time of work on a device: of one piece of it, or the median of many calls."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from redrafter.parallel.ranks import ALONE, Ranks

__all__ = ["Stopwatch", "median_ms"]

WARM_UP_CALLS = 2  # calls of `median_ms` that are not timed
MAX_TIMED_CALLS = 30  # calls that a median is of
MIN_TIMED_CALLS = 5  # fewest on a CPU, where timing stops after MAX_CPU_SECONDS
MAX_CPU_SECONDS = 0.5


class Stopwatch:
    """A context manager that times the work inside it, with the device idle at both ends.

    Work queued before does not count, and kernels that the work launched do, until the last has ended.

    Attributes:
        seconds: Wall-clock time of the work; 0 until the context is left without an exception.
    """

    def __init__(self, device: torch.device):
        self.device, self.seconds, self._began = device, 0.0, 0.0

    def __enter__(self) -> "Stopwatch":
        self._wait()
        self._began = time.perf_counter()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self._wait()
            self.seconds = self.elapsed()

    def elapsed(self) -> float:
        """Return seconds since the context was entered, without waiting for the device."""
        return time.perf_counter() - self._began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _nothing() -> None:
    pass


def median_ms(
    run: Callable[[], Any], device: torch.device, before: Callable[[], Any] = _nothing, ranks: Ranks = ALONE
) -> float:
    """Return the median time of a call in milliseconds, measured by CUDA events on a GPU.

    Args:
        run: The call to time.
        device: The device that it works on.
        before: Called ahead of each timed call, outside of its time.
        ranks: The processes that make the call together, all of them as often.
    """
    for _ in range(WARM_UP_CALLS):
        before()
        run()
    if device.type == "cuda":
        return _median_ms_by_events(run, before)
    seconds: list[float] = []
    while len(seconds) < MIN_TIMED_CALLS or ranks.from_first(
        len(seconds) < MAX_TIMED_CALLS and sum(seconds) < MAX_CPU_SECONDS
    ):
        before()
        with Stopwatch(device) as watch:
            run()
        seconds.append(watch.seconds)
    return 1e3 * statistics.median(seconds)


def _median_ms_by_events(run: Callable[[], Any], before: Callable[[], Any]) -> float:
    """Time calls that are launched one behind the other, so that the GPU always has the next one at hand."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(MAX_TIMED_CALLS)]
    for start, end in events:
        before()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)
