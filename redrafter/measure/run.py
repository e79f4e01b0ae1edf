"""One timed call of `generate`: what it wrote, and how long it took."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from redrafter.engine.engine import Engine
from redrafter.engine.outputs import GenerateOutput, GenerateStats
from redrafter.measure.stopwatch import Stopwatch

__all__ = ["FirstTokenTimer", "Run", "StreamedRun", "timed_run"]


@dataclass(frozen=True)
class Run:
    """One timed call of `generate` on a batch.

    Attributes:
        tokens: New tokens of each output row.
        stats: How speculation went, in total and per row.
        seconds: Time of the whole call, prefill included.
    """

    tokens: list[list[int]]
    stats: GenerateStats
    seconds: float

    @property
    def count(self) -> int:
        """New tokens of all rows."""
        return sum(map(len, self.tokens))

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows per second of the whole call."""
        return self.count / self.seconds

    @property
    def steps(self) -> int:
        """Steps of the batch, which are those of the row that took most."""
        return max(row.steps for row in self.stats.rows)


@dataclass(frozen=True)
class StreamedRun(Run):
    """A run whose tokens were streamed, so that the time of the first is known.

    Attributes:
        first_token: Seconds from the call to the first new token of any row.
    """

    first_token: float


class FirstTokenTimer:
    """A streamer that reads a stopwatch when the first token comes.

    Attributes:
        seconds: What the stopwatch showed; None before the first token.
    """

    def __init__(self, watch: Stopwatch):
        self.watch = watch
        self.seconds: float | None = None

    def put_step(self, row: int, tokens: Sequence[int], accepted: int, ended: bool) -> None:
        """Read the stopwatch at the first call; see `StepStreamer`."""
        if self.seconds is None:
            self.seconds = self.watch.elapsed()

    def end(self) -> None:
        """Do nothing; see `StepStreamer`."""


def timed_run(engine: Engine, ids: Tensor, mask: Tensor, watch: Stopwatch, **arguments: Any) -> Run:
    """Call `engine.generate` once, timed.

    Args:
        engine: The engine to call.
        ids: Prompts, `[B, P]` int64, padded on the left.
        mask: Attention mask of the prompts, `[B, P]`.
        watch: The stopwatch to time the call with, on the engine's device.
        arguments: Further arguments of `generate`, a streamer among them.
    """
    with watch:
        out = engine.generate(ids, mask, return_dict_in_generate=True, **arguments)
    assert isinstance(out, GenerateOutput)
    assert out.stats is not None
    rows = zip(out.sequences[:, ids.shape[1] :].tolist(), out.stats.rows, strict=True)
    # A row's first token came with the prefill, which is no step.
    return Run([row[: stats.emitted + 1] for row, stats in rows], out.stats, watch.seconds)
