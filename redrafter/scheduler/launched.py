"""Forwards that are launched on the device, whose results the host has not read yet."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from redrafter.scheduler.cuda_graphs import PendingReport
from redrafter.scheduler.sequence import SequenceDelta, TokenSequence
from redrafter.step import StepOutput


@dataclass(frozen=True)
class LaunchedStep:
    """A forward that draws tokens of sequences: a step, or the draws after prompts that were read.

    Attributes:
        sequences: The sequences of its first R rows.
        report: For each row what `StepOutput.pack_for_host` says of it.
        logits: Logits along the accepted path, `[K+1, V]`, of the rows whose sequences want them.
        scores: Processed logits, likewise.
        levels: Levels of drafts.
    """

    sequences: Sequence[TokenSequence]
    report: PendingReport
    logits: Mapping[int, Tensor]
    scores: Mapping[int, Tensor]
    levels: int

    @classmethod
    def of(cls, sequences: Sequence[TokenSequence], output: StepOutput, report: PendingReport) -> "LaunchedStep":
        """Take what will be needed of a step's output, which the next step may overwrite."""
        logits, scores = dict[int, Tensor](), dict[int, Tensor]()
        for row, sequence in enumerate(sequences):
            if sequence.wants_logits:
                logits[row] = output.logits[row].index_select(0, output.path.nodes[row])
            if "scores" in sequence.keeps:
                scores[row] = output.scores[row].index_select(0, output.path.nodes[row])
        return cls(sequences, report, logits, scores, output.levels)

    def read(self) -> Iterator[tuple[TokenSequence, SequenceDelta]]:
        """Wait for the step, and yield what it drew for each of its sequences."""
        reports = zip(self.sequences, self.report.read(), strict=False)
        for row, (sequence, (*tokens, accepted, drafted, finite)) in enumerate(reports):
            count = min(accepted + 1, finite)
            logits, scores = (x[row][:count] if row in x else None for x in (self.logits, self.scores))
            drafts, overflowed = drafted if self.levels > 0 and sequence.params.speculate else None, finite <= accepted
            drawn = SequenceDelta(tokens[:count], drafted=drafts, logits=logits, scores=scores, overflowed=overflowed)
            yield sequence, drawn


@dataclass(frozen=True)
class LaunchedPrefill:
    """A forward over chunks of prompts.

    Attributes:
        first: The draws of the tokens that follow prompts; None where none is complete.
        size: Tokens of the forward, with those of padding; 0 for one whose time is not measured.
        timer: Measures the forward.
    """

    first: LaunchedStep | None
    size: int
    timer: "Timer"


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
