"""Timing of single calls, and of the memory bus that they are held against."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Bandwidth", "copy_bandwidth", "median_ms"]

COUNT = 30  # calls that a median is of
ENOUGH = 0.5  # seconds after which fewer do on a CPU, but not fewer than FEWEST
FEWEST = 5


def _nothing() -> None:
    pass


def median_ms(run: Callable[[], Any], device: torch.device, before: Callable[[], Any] = _nothing) -> float:
    """Milliseconds of `run()`; by CUDA events on a GPU. before: called ahead of each, outside of its time."""
    for _ in range(2):
        before()
        run()
    if device.type == "cuda":
        return _by_events(run, before)
    times: list[float] = []
    while len(times) < FEWEST or (len(times) < COUNT and sum(times) < ENOUGH * 1e3):
        before()
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def _by_events(run: Callable[[], Any], before: Callable[[], Any]) -> float:
    """Nothing waits between the calls, so that the GPU always has the next one at hand."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(COUNT)]
    for start, end in events:
        before()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


@dataclass(frozen=True)
class Bandwidth:
    """Bytes read and written per second by a copy of a buffer that no cache holds."""

    bytes_per_second: float
    buffer_bytes: int

    def ms(self, moved: int) -> float:
        """The floor: what moving so many bytes takes."""
        return 1e3 * moved / self.bytes_per_second


def copy_bandwidth(device: torch.device) -> Bandwidth:
    size = 1 << 28
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        size = min(1 << 31, free // 4)
    ms = _copy_ms(size, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Bandwidth(2 * size / ms * 1e3, size)


def _copy_ms(size: int, device: torch.device) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return median_ms(lambda: target.copy_(source), device)
