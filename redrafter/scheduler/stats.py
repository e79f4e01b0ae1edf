"""Counts of how speculation went."""

from dataclasses import dataclass, field

__all__ = ["Stats"]


@dataclass
class Stats:
    """Statistics of speculation. A step is one forward of the target over a tree; prefill is not one.

    Attributes:
        steps: Steps taken, those without drafts included.
        drafted: Drafts verified.
        accepted: Drafts that became output.
        emitted: Tokens that steps added to the output.
        accepted_by_depth: Entry d counts the steps in which at least d + 1 drafts became output.
        plain_steps: Steps for which nothing was drafted, because drafting was off or had paused. A step in which the
            rows share the nodes that are verified, and none was left for this one, is not plain.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    plain_steps: int = 0

    @property
    def draft_steps(self) -> int:
        """Steps for which there were drafts, whether any of them was verified or not."""
        return self.steps - self.plain_steps

    @property
    def tokens_per_step(self) -> float:
        """Tokens that came out of a step, on average; 0 before the first."""
        return self.emitted / self.steps if self.steps else 0.0

    def count(self, drafted: int | None, accepted: int, emitted: int) -> None:
        """Add one step.

        Args:
            drafted: Drafts verified; None for a plain step.
            accepted: Drafts that became output, after a stop cut the step.
            emitted: Tokens that became output, likewise.
        """
        self.steps += 1
        self.plain_steps += drafted is None
        self.drafted += drafted or 0
        self.accepted += accepted
        self.emitted += emitted
        for depth in range(accepted):
            self.accepted_by_depth[depth] += 1
