"""Products of fixed blocks of rows: a row has the same bits among any others."""

import pytest
import torch
from torch.nn.functional import linear, silu

from redrafter.kernels.invariant_linear import in_full_vectors, invariant_expert_linear, invariant_linear

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(64, 64), (17, 101), (100, 48), (513, 1000), (2048, 97), (1024, 2048), (4096, 64)]


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "features"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_row_has_the_same_bits_alone_and_among_others(inner, features, biased, dtype):
    x, weight = random(70, inner, dtype=dtype), random(features, inner, dtype=dtype, seed=1) * inner**-0.5
    bias = random(features, dtype=dtype, seed=2) if biased else None
    whole = invariant_linear(x, weight, bias)
    for first, count in ((0, 1), (69, 1), (3, 7), (11, 26), (30, 40)):
        assert torch.equal(invariant_linear(x[first : first + count], weight, bias), whole[first : first + count])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_place_in_a_block_and_the_rows_beside_it_change_no_bit(dtype):
    weight, row = random(96, 100, dtype=dtype, seed=1), random(1, 100, dtype=dtype)
    expected = invariant_linear(row, weight, None)[0]
    for place in range(16):
        others = random(16, 100, dtype=dtype, seed=place) * 100
        others[place] = row[0]
        assert torch.equal(invariant_linear(others, weight, None)[place], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_equals_the_product_of_torch(dtype):
    x, weight, bias = random(2, 5, 30, dtype=dtype), random(20, 30, dtype=dtype, seed=1), random(20, dtype=dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    found = invariant_linear(x, weight, bias)
    torch.testing.assert_close(found, linear(x, weight, bias), atol=tolerance, rtol=tolerance)


def test_there_may_be_no_rows():
    assert invariant_linear(torch.ones(2, 0, 8), torch.ones(5, 8), None).shape == (2, 0, 5)


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_of_experts_have_the_bits_of_a_product_with_that_expert_alone(transposed):
    x, expert = random(41, 24), torch.arange(41) * 7 % 5
    weight = random(6, 24, 32, seed=1).transpose(1, 2) if transposed else random(6, 32, 24, seed=1)
    found = invariant_expert_linear(x, weight, expert)
    for row in range(41):
        assert torch.equal(found[row], invariant_linear(x[row : row + 1], weight[expert[row]], None)[0])


@pytest.mark.parametrize("count", [1, 3, 70, 40_000])
def test_a_function_of_single_numbers_gives_each_the_same_bits_at_any_place(count):
    x = random(count) * 3
    whole = in_full_vectors(silu, x)
    torch.testing.assert_close(whole, silu(x))
    for first in {0, count // 2, count - 1}:
        assert torch.equal(in_full_vectors(silu, x[first:]), whole[first:])
