"""Inputs of FP8 products: each token is rounded to FP8 by itself, and kernels write what their reference does."""

import pytest
import torch

pytest.importorskip("triton")

from helpers.attention import DEVICE
from redrafter.kernels.float8_inputs import round_inputs
from redrafter.kernels.float8_rounding import MAX_ROUNDED_WIDTH, round_to_float8, round_values

CUDA = DEVICE == "cuda"
HAS_FLOAT8 = not CUDA or torch.cuda.get_device_capability() >= (8, 9)
HALF = [torch.float16, torch.bfloat16] if CUDA else [torch.float16]  # the interpreter cannot cast bfloat16
LARGEST = torch.finfo(torch.float8_e4m3fn).max
in_every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def random(tokens, width, dtype):
    """Return numbers of both signs, of sizes that differ from token to token and within each."""
    generator = torch.Generator().manual_seed(tokens * width)
    sizes = torch.randint(-12, 5, (tokens, 1), generator=generator) - 6 * torch.rand(tokens, width, generator=generator)
    return (torch.randn(tokens, width, generator=generator) * 2**sizes).to(dtype)


def filled(*numbers):
    """Return a maker of tokens that have these numbers, or those of the dtype that functions return, in turn."""

    def make(tokens, width, dtype):
        limits = torch.finfo(dtype)
        row = torch.tensor([number(limits) if callable(number) else number for number in numbers]).to(dtype)
        return row.repeat(tokens * width // len(row) + 1)[: tokens * width].view(tokens, width)

    return make


KINDS = {
    "random": random,
    "zeros": filled(0.0, -0.0),
    "zeros beside others": filled(0.0, -0.0, -1e-3, 1.0),
    "halfway": filled(*range(-448, 449, 3)),
    "at the largest of a scale": filled(448.0, -449.0, 3.0),
    "huge": filled(lambda limits: limits.max, lambda limits: -limits.max, lambda limits: limits.max / 300, -1.0),
    "infinite": filled(float("inf"), 1.0, float("-inf")),
    "tiny": filled(lambda limits: limits.tiny, lambda limits: -1.3 * limits.tiny),
    "subnormal": filled(*(lambda limits, n=n: n * limits.smallest_normal / 1024 for n in range(-40, 50, 7))),
}


def bits(x):
    return x.view(torch.uint8)


def check(x):
    """Fail unless the kernels write what the reference does of inputs `[..., D]`."""
    values, scale = round_inputs(x)
    assert torch.equal(bits(round_values(x)), bits(values))
    if HAS_FLOAT8:
        narrow, found_scale = round_to_float8(x)
        assert torch.equal(found_scale, scale)
        assert torch.equal(bits(narrow), bits((values.float() / scale).to(torch.float8_e4m3fn)))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("width", [16, 48, 100, 4096, pytest.param(14336, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_write_what_the_reference_does(kind, tokens, width, dtype):
    check(KINDS[kind](tokens, width, dtype).to(DEVICE))


@pytest.mark.parametrize("dtype", HALF)
def test_kernels_take_the_widest_tokens_and_numbers_that_are_apart(dtype):
    check(random(2, MAX_ROUNDED_WIDTH, dtype).to(DEVICE))
    for apart in (slice(None, None, 2), slice(7, 55)):
        check(random(3, 96, dtype).to(DEVICE)[:, apart])


@pytest.mark.parametrize("shape", [(96,), (0, 96), (2, 3, 96)])
def test_kernels_take_inputs_of_any_shape(shape):
    check(torch.randn(shape).to(DEVICE, HALF[0]))


@in_every_dtype
def test_what_is_not_a_number_stays_so(dtype):
    x = torch.tensor([[float("nan"), 1.0], [1.0, 2.0]], dtype=dtype, device=DEVICE)
    for values in (round_inputs(x).values, *([round_values(x)] if dtype in HALF else [])):
        assert bool(values[0, 0].isnan())
        assert torch.equal(values[1], x[1])
    if CUDA and HAS_FLOAT8 and dtype in HALF:  # the interpreter makes a number of it
        narrow, scale = round_to_float8(x)
        assert bool(narrow[0, 0].isnan())
        assert torch.equal(narrow[1].float() * scale[1], x[1].float())


@in_every_dtype
def test_numbers_are_those_of_fp8_times_the_least_power_of_two_that_cuts_none(dtype):
    x = random(500, 96, dtype).to(DEVICE)
    values, scale = round_inputs(x)
    assert values.dtype == dtype
    assert torch.equal(values.float(), (x.float() / scale).to(torch.float8_e4m3fn).float() * scale)
    assert scale.shape == (500, 1)
    assert bool((torch.frexp(scale).mantissa == 0.5).all())
    largest = x.float().abs().amax(dim=1, keepdim=True) / scale
    assert bool(((largest <= LARGEST) & (largest > LARGEST / 2)).all())
    assert torch.equal(round_inputs(values).values, values)


@pytest.mark.parametrize(("largest", "scale"), [(448.0, 1.0), (449.0, 2.0), (896.0, 2.0), (0.5, 2.0**-9)])
def test_the_scale_of_a_largest_number(largest, scale):
    assert float(round_inputs(torch.tensor([[1e-3, -largest, 0.0]])).scale) == scale


@in_every_dtype
def test_a_token_is_rounded_as_it_is_alone(dtype):
    x = random(14, 96, dtype).view(2, 7, 96).to(DEVICE)
    together = round_inputs(x)
    for i, j in [(0, 0), (1, 6)]:
        alone = round_inputs(x[i, j])
        assert torch.equal(together.values[i, j], alone.values)
        assert torch.equal(together.scale[i, j], alone.scale)


@in_every_dtype
@pytest.mark.parametrize("shape", [(3, 8), (0, 8), (8,)])
def test_zeros_stay_zeros(shape, dtype):
    values, scale = round_inputs(torch.zeros(shape, dtype=dtype, device=DEVICE))
    assert not values.any()
    assert values.shape == shape
    assert scale.shape == (*shape[:-1], 1)
    assert bool((scale > 0).all())


@in_every_dtype
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
