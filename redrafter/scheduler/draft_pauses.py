"""Which steps of a running batch draft nothing, where the cost of drafting depends on the number of rows."""

from collections.abc import Callable

from redrafter.drafting.draft_length import DraftGain

__all__ = ["DraftPauses"]


class DraftPauses:
    """Decides by what earlier steps of the same cost have gained whether the next one drafts."""

    def __init__(self, cost_of: Callable[[int], float | None]):
        """Begin with drafts.

        Args:
            cost_of: Returns the time of a step of so many rows with drafts, in steps without; None where every step
                drafts.
        """
        self._cost_of = cost_of
        self._gains: dict[float, DraftGain] = {}  # by cost: batches of many sizes may share one

    def _gain(self, rows: int) -> DraftGain | None:
        cost = self._cost_of(rows)
        return None if cost is None else self._gains.setdefault(cost, DraftGain(cost))

    def should_draft(self, rows: int) -> bool:
        """Decide whether the next step drafts. To be called once for each step. rows: how many it has."""
        gain = self._gain(rows)
        return gain is None or gain.should_draft()

    def observe(self, rows: int, drafted_rows: int, tokens: int) -> None:
        """Take note of a step with drafts.

        Args:
            rows: Its rows.
            drafted_rows: Those that took drafts, at least 1.
            tokens: Tokens that these gained.
        """
        if (gain := self._gain(rows)) is not None:
            gain.observe(drafted_rows, tokens)
