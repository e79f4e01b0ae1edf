"""A call of `generate` while it is decoded: its rows, and the scheduler that runs them."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from tqdm import tqdm

from redrafter.engine.request import Request
from redrafter.engine.stopping import first_stop
from redrafter.engine.streaming import StepStreamer
from redrafter.errors import NotFiniteError
from redrafter.scheduler.scheduler import Scheduler
from redrafter.scheduler.sequence import SamplingParams, SequenceDelta, TokenSequence

__all__ = ["Outcome", "Row", "queued", "run_call"]


@dataclass
class Outcome:
    """Counts the ends of a call's rows and keeps the first error, so that no step has to look at all of the rows.

    Attributes:
        ended: Number of rows that have ended.
        error: What ended a row that did not end by itself; None where there is no such row.
    """

    ended: int = 0
    error: BaseException | None = None

    def note(self, delta: SequenceDelta) -> None:
        """Take note of what a step added to a row."""
        self.ended += delta.finish is not None
        self.error = self.error or delta.error


class Row:
    """One output row of a call: its sequence, and what is recorded of each token.

    Attributes:
        sequence: The sequence, which knows the prompt without padding.
        text: New tokens so far.
        scores: Processed scores of its tokens, `[count, V]` float32 per step; empty where nobody asked.
        logits: Logits of its tokens, likewise.
    """

    def __init__(self, index: int, request: Request, prompt: list[int], outcome: Outcome, stream: StepStreamer | None):
        """Make a row that has not begun.

        Args:
            index: Its index in the call.
            request: The call.
            prompt: Its prompt as it came, padding included.
            outcome: Takes note of its end.
            stream: Takes its tokens as they are made, or None.
        """
        self._prompt, self._criteria, self._pad_token = prompt, request.criteria, request.pad_token
        self._index, self._outcome, self._stream = index, outcome, stream
        self.text: list[int] = []
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []
        wanted = {"scores": request.want_scores, "logits": request.want_logits}
        self.sequence = TokenSequence(
            request.prompts[index, : request.lengths[index]].tolist(),
            request.limits[index] - request.lengths[index],
            SamplingParams(stop_token_ids=request.eos),
            self._record,
            self._find_stop if self._criteria else None,
            adapter=request.adapters[index],
            index=index,
            keeps=frozenset(name for name, want in wanted.items() if want),
            images=request.images[index],
        )

    def _find_stop(self, new: Sequence[int]) -> int | None:
        """Return the index of the first of `new` tokens that the text ends with, or None."""
        end: int | None = None
        for criterion in self._criteria:
            stop = first_stop(criterion, self._prompt + self.text, new, self._pad_token)
            if stop is not None:
                end, new = stop, new[: stop + 1]
        return end

    def _record(self, sequence: TokenSequence, delta: SequenceDelta) -> None:
        if isinstance(delta.error, NotFiniteError):
            delta = replace(delta, error=NotFiniteError(f"row {self._index}: {delta.error}"))
        self._outcome.note(delta)
        if delta.error is not None:
            return
        self.text += delta.tokens
        for recorded, new in ((self.scores, delta.scores), (self.logits, delta.logits)):
            if new is not None:
                recorded.append(new.to(torch.float32, copy=True))  # a view would keep those of rejected drafts
        if self._stream is not None:
            self._stream.put_step(self._index, delta.tokens, delta.accepted, delta.finish is not None)


@contextmanager
def queued(scheduler: Scheduler, rows: Sequence[Row]) -> Iterator[None]:
    """Queue the rows of a call, and take back what they still hold when the context is left.

    Within the context an exception in a round is raised by that round.

    Args:
        scheduler: A scheduler without sequences.
        rows: The rows, in the order in which they begin.
    """
    scheduler.on_failure = _raise
    try:
        scheduler.enqueue(*(row.sequence for row in rows))
        yield
    finally:
        scheduler.abandon()


def _raise(error: Exception, _: int) -> None:
    raise error


def run_call(
    scheduler: Scheduler, rows: Sequence[Row], outcome: Outcome, deadline: float = float("inf"), progress: bool = False
) -> None:
    """Decode the rows of a call until all have ended.

    Args:
        scheduler: A scheduler without sequences.
        rows: The rows, in the order in which they begin.
        outcome: The outcome that these rows report to.
        deadline: `time.time()` after which no step begins; rows are then as long as they are.
        progress: Whether to show a bar of the rows that have ended.
    """
    with queued(scheduler, rows), tqdm(total=len(rows), unit="text", disable=not progress) as bar:
        while not scheduler.idle:
            scheduler.read()
            if deadline < float("inf") and scheduler.engine.target.ranks.from_first(time.time() >= deadline):
                scheduler.settle()
                return
            scheduler.step()
            if progress:
                bar.update(outcome.ended - bar.n)
            if outcome.error is not None:
                raise outcome.error
