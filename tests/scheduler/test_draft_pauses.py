"""Pauses of drafting in batches whose steps cost more the more rows they have."""

from redrafter.drafting.draft_length import FIRST_PAUSE
from redrafter.scheduler.running_batch import DraftPauses


def cost_of(rows: int) -> float | None:
    return None if rows > 8 else 1.25 if rows < 4 else 2.0


def test_each_cost_has_pauses_of_its_own():
    pauses = DraftPauses(cost_of)
    for rows in (2, 4):
        for _ in range(4):
            pauses.observe(rows, rows, 3 * rows // 2)
    assert not pauses.should_draft(4)
    assert not pauses.should_draft(8)
    assert pauses.should_draft(2)


def test_sizes_of_one_cost_pause_together():
    pauses = DraftPauses(lambda rows: 1.5)
    pauses.observe(8, 8, 9)
    assert not any(pauses.should_draft(1 + step % 3) for step in range(FIRST_PAUSE))
    assert pauses.should_draft(1)


def test_rows_without_a_cost_always_draft():
    pauses = DraftPauses(cost_of)
    pauses.observe(9, 9, 9)
    assert pauses.should_draft(9)
