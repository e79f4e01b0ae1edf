"""Counts of how speculation went."""

from dataclasses import dataclass, field

__all__ = ["Stats"]


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
