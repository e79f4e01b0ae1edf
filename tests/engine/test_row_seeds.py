"""The seed of each row, from one int, one per row, or none."""

import pytest

from helpers.models import tiny_drafter, uneven_batch, with_tree
from redrafter import ArgumentError
from redrafter.engine.row_seeds import row_seeds


def test_rows_count_on_from_one_seed():
    assert row_seeds(40, 3) == [40, 41, 42]


def test_rows_may_have_their_own_seeds():
    assert row_seeds([7, 7, 0], 3) == [7, 7, 0]


def test_without_a_seed_each_row_has_a_fresh_one():
    assert len(set(row_seeds(None, 8))) == 8


@pytest.mark.parametrize(
    ("seed", "named"),
    [([1, 2], "2 entries for 4 output rows"), ("a", "a seed is an int"), (-1, "a seed is an int")],
)
def test_what_is_no_seed_is_refused(llama, seed, named):
    ids, mask = uneven_batch()
    with pytest.raises(ArgumentError, match=named):
        with_tree(llama, tiny_drafter(), 3, 3).generate(ids, mask, do_sample=True, seed=seed)
