"""The trees that `redrafter tune` tries, and the choice among what it measured."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from redrafter.checkpoints.tree_shape import TreeShape
from redrafter.drafting.recurrent import RecurrentProposer

__all__ = ["Timing", "candidates", "choose", "step_costs", "table"]

NODE_BUDGETS = (4, 8, 16)  # tried beside all nodes of the lattice
MIN_RATIO = 1.03  # times plain decoding's speed, for a tree to be chosen; less is noise


@dataclass(frozen=True)
class Timing:
    """One tree, or plain decoding, at one batch size.

    Attributes:
        batch: Rows in the batch.
        shape: The tree; None for plain decoding.
        tokens_per_step: New tokens of a row per step.
        step_ms: Median time of a step in milliseconds.
    """

    batch: int
    shape: TreeShape | None
    tokens_per_step: float
    step_ms: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows per second, prefill excluded."""
        return 1000 * self.batch * self.tokens_per_step / self.step_ms

    def to_dict(self) -> dict[str, Any]:
        """Return the timing as JSON holds it, with its tokens per second."""
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}


def candidates(own: RecurrentProposer, beams: Sequence[int], lengths: Sequence[int]) -> list[RecurrentProposer]:
    """Return the trees to try: every lattice at several node budgets, the pair's own first, then from small to large.

    Args:
        own: The proposer that the pair uses now.
        beams: Numbers of beams to try; those above the drafter's vocabulary are left out.
        lengths: Draft lengths per beam to try.
    """
    vocabulary = own.drafter.config.draft_vocab_size or own.drafter.config.vocab_size
    ordered = []
    for width in (width for width in beams if width <= vocabulary):
        for depth in lengths:
            is_own, lattice = (width, depth) == (own.beams, own.depth), 1 + width * depth
            budgets = {*NODE_BUDGETS, lattice} | ({own.nodes} if is_own else set())
            nodes = [n for n in sorted(budgets) if n <= lattice]
            ordered += [(not is_own, n, replace(own, beams=width, depth=depth, nodes=n)) for n in nodes]
    return [proposer for *_, proposer in sorted(ordered, key=lambda candidate: candidate[:2])]


def choose(timings: Sequence[Timing], open_sizes: set[int]) -> dict[int, TreeShape | None]:
    """Return the fastest tree by batch size; None where none is `MIN_RATIO` times as fast as plain decoding.

    Args:
        timings: What was measured, plain decoding included.
        open_sizes: Batch sizes at which trees were left out for want of time. One of them at which no tree was measured
            is left out of the result.
    """
    shapes = {}
    for plain in (timing for timing in timings if timing.shape is None):
        best = _best(timings, plain.batch)
        if best is not None or plain.batch not in open_sizes:
            worth = best is not None and best.tokens_per_second >= MIN_RATIO * plain.tokens_per_second
            shapes[plain.batch] = best.shape if best is not None and worth else None
    return shapes


def _best(timings: Sequence[Timing], batch: int) -> Timing | None:
    trees = [timing for timing in timings if timing.batch == batch and timing.shape is not None]
    return max(trees, key=lambda timing: timing.tokens_per_second, default=None)


def step_costs(timings: Sequence[Timing], shapes: dict[int, TreeShape | None]) -> dict[int, float]:
    """Return the time of a step with each tree that was chosen, in steps of plain decoding, by batch size."""
    return {row["batch"]: row["step_cost"] for row in table(timings, shapes) if row["shape"] is not None}


def table(timings: Sequence[Timing], shapes: dict[int, TreeShape | None]) -> list[dict[str, Any]]:
    """Return a row per batch size: the timing of the tree chosen, and plain decoding's speed.

    Beside them, `ratio` is the tree's speed over plain decoding's, and `step_cost` its time of a step over plain
    decoding's.
    """
    by_key = {(timing.batch, timing.shape): timing for timing in timings}
    rows = []
    for batch, shape in sorted(shapes.items()):
        chosen, plain = by_key[batch, shape], by_key[batch, None]
        speed, plain_speed = chosen.tokens_per_second, plain.tokens_per_second
        cost = chosen.step_ms / plain.step_ms
        ratios = {"plain_tokens_per_second": plain_speed, "ratio": speed / plain_speed, "step_cost": cost}
        rows.append(chosen.to_dict() | ratios)
    return rows
