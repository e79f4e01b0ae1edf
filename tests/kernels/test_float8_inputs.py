"""Inputs of FP8 products: each token is rounded to FP8 by itself."""

import pytest
import torch

from helpers.attention import DEVICE
from redrafter.kernels.float8_inputs import round_inputs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def random(*shape, dtype=torch.float32):
    """Return tokens of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(-12, 5, (*shape[:-1], 1), generator=generator)
    return (torch.randn(*shape, generator=generator) * 2.0**sizes).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_those_of_fp8_times_a_scale(dtype):
    x = random(500, 96, dtype=dtype)
    values, scale = round_inputs(x)
    assert values.dtype == dtype
    assert torch.equal(values.float(), (x.float() / scale).to(torch.float8_e4m3fn).float() * scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_is_the_least_power_of_two_that_cuts_no_number(dtype):
    x = random(500, 96, dtype=dtype)
    scale = round_inputs(x).scale
    assert scale.shape == (500, 1)
    assert bool((torch.frexp(scale).mantissa == 0.5).all())
    largest = x.float().abs().amax(dim=1, keepdim=True) / scale
    assert bool(((largest <= LARGEST) & (largest > LARGEST / 2)).all())


@pytest.mark.parametrize(("largest", "scale"), [(448.0, 1.0), (449.0, 2.0), (896.0, 2.0), (0.5, 2.0**-9)])
def test_the_scale_of_a_largest_number(largest, scale):
    assert float(round_inputs(torch.tensor([[1e-3, -largest, 0.0]])).scale) == scale


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_is_rounded_as_it_is_alone(dtype):
    x = random(2, 7, 96, dtype=dtype)
    together = round_inputs(x)
    for i, j in [(0, 0), (1, 6)]:
        alone = round_inputs(x[i, j])
        assert torch.equal(together.values[i, j], alone.values)
        assert torch.equal(together.scale[i, j], alone.scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_rounded_stays_as_it_is(dtype):
    values = round_inputs(random(500, 96, dtype=dtype)).values
    assert torch.equal(round_inputs(values).values, values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 8), (0, 8), (8,)])
def test_zeros_stay_zeros(shape, dtype):
    values, scale = round_inputs(torch.zeros(shape, dtype=dtype, device=DEVICE))
    assert not values.any()
    assert values.shape == shape
    assert scale.shape == (*shape[:-1], 1)
    assert bool((scale > 0).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_of_a_dtype_stay_finite(dtype):
    x = torch.full((2, 8), torch.finfo(dtype).max, dtype=dtype, device=DEVICE)
    values, scale = round_inputs(torch.cat([x, -x], dim=1))
    assert torch.equal(values, torch.cat([x, -x], dim=1).sign() * values.abs().max())
    torch.testing.assert_close(values[:, :8], x, rtol=0.0625, atol=0.0)
    assert bool((values.float().abs() / scale <= LARGEST).all())


def test_the_least_numbers_of_float16_are_kept():
    least = torch.finfo(torch.float16).smallest_normal / 1024
    x = (torch.arange(-8, 9, device=DEVICE) * least).half()[None]
    assert torch.equal(round_inputs(x).values, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_a_number_stays_so(dtype):
    x = torch.tensor([[float("nan"), 1.0], [1.0, 2.0]], dtype=dtype, device=DEVICE)
    values = round_inputs(x).values
    assert bool(values[0, 0].isnan())
    assert torch.equal(values[1], x[1])
