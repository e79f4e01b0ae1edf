"""Pauses of drafting in batches whose steps cost more the more rows they have."""

from redrafter.drafting.draft_length import FIRST_PAUSE, DraftPauses


def cost_of(rows: int) -> float | None:
    return None if rows > 8 else 1.25 if rows < 4 else 2.0


def test_each_cost_has_pauses_of_its_own():
    pauses = DraftPauses(cost_of)
    for rows in (2, 4):
        for _ in range(4):
            pauses.gain(rows).observe(rows, 3 * rows // 2)
    assert not pauses.gain(4).should_draft()
    assert not pauses.gain(8).should_draft()
    assert pauses.gain(2).should_draft()


def test_sizes_of_one_cost_pause_together():
    pauses = DraftPauses(lambda rows: 1.5)
    pauses.gain(8).observe(8, 9)
    assert not any(pauses.gain(1 + step % 3).should_draft() for step in range(FIRST_PAUSE))
    assert pauses.gain(1).should_draft()


def test_rows_without_a_cost_always_draft():
    assert DraftPauses(cost_of).gain(9) is None
