"""The output of `generate`: tokens, scores and statistics."""

from dataclasses import dataclass, field

from transformers.generation.utils import GenerateDecoderOnlyOutput

from redrafter.scheduler.sequence import Stats

__all__ = ["GenerateOutput", "GenerateStats"]


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
            plain_steps=sum(row.plain_steps for row in rows),
            rows=rows,
            seeds=seeds,
        )


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """The output of a decoder-only model in transformers, plus `stats`."""

    stats: GenerateStats | None = None
