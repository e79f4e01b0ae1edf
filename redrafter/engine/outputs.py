"""The output of `generate`: tokens, scores and statistics."""

from dataclasses import dataclass, field

from transformers.generation.utils import GenerateDecoderOnlyOutput

__all__ = ["GenerateOutput", "GenerateStats", "Stats"]


@dataclass
class Stats:
    """Statistics of speculation. A step is one forward of the target over a tree; prefill is not one.

    Attributes:
        steps: Steps taken.
        drafted: Drafts verified.
        accepted: Drafts that became output.
        emitted: Tokens that steps added to the output.
        accepted_by_depth: Entry d counts the steps in which at least d + 1 drafts became output.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that came out of a step, on average; 0 before the first."""
        return self.emitted / self.steps if self.steps else 0.0

    def count(self, drafted: int, accepted: int, emitted: int) -> None:
        """Add one step, of which `accepted` drafts and `emitted` tokens became output after a stop cut it."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.emitted += emitted
        for depth in range(accepted):
            self.accepted_by_depth[depth] += 1


@dataclass
class GenerateStats(Stats):
    """Statistics of a batch: totals, in which a row's step counts once for that row, and those of each row.

    Attributes:
        rows: Statistics of each output row.
        seeds: The seed of each output row; None when greedy.
    """

    rows: list[Stats] = field(default_factory=list)
    seeds: list[int] | None = None

    @classmethod
    def of(cls, rows: list[Stats], seeds: list[int] | None) -> "GenerateStats":
        """Sum the statistics of rows."""
        depths = zip(*(row.accepted_by_depth for row in rows), strict=True)
        return cls(
            steps=sum(row.steps for row in rows),
            drafted=sum(row.drafted for row in rows),
            accepted=sum(row.accepted for row in rows),
            emitted=sum(row.emitted for row in rows),
            accepted_by_depth=[sum(depth) for depth in depths],
            rows=rows,
            seeds=seeds,
        )


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """The output of a decoder-only model in transformers, plus `stats`."""

    stats: GenerateStats | None = None
