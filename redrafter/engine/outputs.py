"""What `generate` returns beside the tokens."""

from dataclasses import dataclass, field

from transformers.generation.utils import GenerateDecoderOnlyOutput

__all__ = ["GenerateOutput", "GenerateStats", "Stats"]


@dataclass
class Stats:
    """How speculation went. A step is one forward of the target over a tree; prefill is not one.

    steps: steps taken. drafted: drafts verified. accepted: drafts that became output. accepted_by_depth: entry d counts
    the steps in which at least d + 1 drafts became output.
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
        """Add one step. accepted, emitted: what of it became output, after a stop cut it."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.emitted += emitted
        for depth in range(accepted):
            self.accepted_by_depth[depth] += 1


@dataclass
class GenerateStats(Stats):
    """Totals over the batch; a row's step counts once for that row. rows: the same per output row. seeds: the seed of
    each output row, None when greedy."""

    rows: list[Stats] = field(default_factory=list)
    seeds: list[int] | None = None

    @classmethod
    def of(cls, rows: list[Stats], seeds: list[int] | None) -> "GenerateStats":
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
    """As transformers' output of a decoder-only model, plus `stats`."""

    stats: GenerateStats | None = None
