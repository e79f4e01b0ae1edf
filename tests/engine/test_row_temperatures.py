"""Temperatures of rows that are refused, or smaller than scores can be divided by."""

import pytest
import torch

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


@pytest.mark.parametrize("temperature", [1e-37, 1e-39, 1e-45, 1e-60])
def test_a_temperature_near_0_takes_the_likeliest_token(llama, temperature):
    engine = with_tree(llama, tiny_drafter(), 3, 3)
    greedy = engine.generate(IDS, MASK, do_sample=False, max_new_tokens=8)
    for given in (temperature, [temperature] * len(IDS)):
        assert torch.equal(engine.generate(IDS, MASK, temperature=given, do_sample=True, max_new_tokens=8), greedy)
