"""Sums over the vocabulary: right, and the same bits for a row alone and among others."""

import pytest
import torch

from redrafter.sampling.processors import row_softmax, running_sum


def scores(rows, count):
    return torch.randn(rows, count, generator=torch.Generator().manual_seed(count)) * 3


@pytest.mark.parametrize("count", [1, 5, 128, 129, 1000, 32_001])
def test_a_running_sum_is_that_of_torch(count):
    probs = scores(3, count).softmax(-1)
    torch.testing.assert_close(running_sum(probs), probs.cumsum(-1), atol=1e-5, rtol=1e-5)
    assert running_sum(torch.ones(2, 1, count))[1, 0].tolist() == list(range(1, count + 1))


@pytest.mark.parametrize("count", [1, 5, 16, 97, 1001])
def test_a_softmax_is_that_of_torch(count):
    torch.testing.assert_close(row_softmax(scores(3, count)), scores(3, count).softmax(-1))


@pytest.mark.parametrize("function", [running_sum, row_softmax])
@pytest.mark.parametrize("count", [97, 1000])
def test_a_row_alone_has_the_bits_that_it_has_among_others(function, count):
    whole = function(scores(70, count))
    for row in (0, 33, 69):
        assert torch.equal(function(scores(70, count)[row : row + 1]), whole[row : row + 1])
