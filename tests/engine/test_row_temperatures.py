"""Temperatures of rows that are refused."""

import pytest

from helpers.models import tiny_drafter, uneven_batch, with_tree
from redrafter import ArgumentError

IDS, MASK = uneven_batch()


@pytest.mark.parametrize(
    ("temperature", "named"),
    [(-1.0, "temperature"), ([1.0, 2.0], "one per output row"), ([1.0, 1.0, 0.0, 1.0], "must be positive")],
)
def test_what_is_no_temperature_of_a_row_is_refused(llama, temperature, named):
    engine = with_tree(llama, tiny_drafter(), 3, 3)
    with pytest.raises(ArgumentError, match=named):
        engine.generate(IDS, MASK, temperature=temperature, do_sample=True)
