"""Forwards that are launched on the device, whose results the host has not read yet."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from redrafter.engine.cuda_graphs import PendingReport
from redrafter.scheduler.sequence import TokenSequence

__all__ = ["LaunchedPrefill", "LaunchedStep", "Timer"]


@dataclass(frozen=True)
class LaunchedStep:
    """A step of the running batch.

    Attributes:
        sequences: The sequence of each of its R rows.
        report: For each row, and rows behind them, its tokens and, last, its number of accepted drafts.
        logits: Logits along the accepted path, `[K+1, V]`, of the rows whose log-probabilities are wanted.
        drafted: Drafts verified in each row that speculates.
    """

    sequences: Sequence[TokenSequence]
    report: PendingReport
    logits: Mapping[int, Tensor]
    drafted: int

    def read(self) -> list[list[int]]:
        """Wait for the step, and return for each row its tokens and, last, its number of accepted drafts."""
        return self.report.read()[: len(self.sequences)]


@dataclass(frozen=True)
class LaunchedPrefill:
    """A forward over chunks of prompts.

    Attributes:
        sequences: The R sequences whose first token it draws.
        report: Their first tokens, each followed by 0 accepted drafts, `[R, 2]`; None where R is 0.
        logits: Logits that the first token is drawn from, `[1, V]`, of the rows whose log-probabilities are wanted.
        size: Tokens of the forward, with those of padding.
        timer: Measures the forward.
    """

    sequences: Sequence[TokenSequence]
    report: PendingReport | None
    logits: Mapping[int, Tensor]
    size: int
    timer: "Timer"

    drafted = 0

    def read(self) -> list[list[int]]:
        """Wait for the forward, and return for each row its first token and 0, its number of accepted drafts."""
        return [] if self.report is None else self.report.read()


class Timer:
    """Measures work on a device without waiting for it."""

    def __init__(self, device: torch.device):
        """Begin to measure what is launched from now on."""
        self._mark: Callable[[], Any] = time.perf_counter
        if device.type == "cuda":
            self._mark = _recorded_event
        self._began, self._ended = self._mark(), None

    def stop(self) -> None:
        """Measure nothing that is launched later."""
        self._ended = self._mark()

    @property
    def seconds(self) -> float:
        """Duration of the work, which is waited for."""
        assert self._ended is not None, "stop comes first"
        if isinstance(self._ended, float):
            return self._ended - self._began
        self._ended.synchronize()
        return self._began.elapsed_time(self._ended) / 1e3


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
