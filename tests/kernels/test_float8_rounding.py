"""The kernels that round inputs of FP8 products write what their reference does, bit for bit."""

import pytest
import torch

pytest.importorskip("triton")

from helpers.attention import DEVICE
from redrafter.kernels.float8_inputs import round_inputs
from redrafter.kernels.float8_rounding import MAX_ROUNDED_WIDTH, round_to_float8, round_values

CUDA = DEVICE == "cuda"
HALF = [torch.float16, torch.bfloat16] if CUDA else [torch.float16]  # the interpreter cannot cast bfloat16
WIDTHS = [16, 48, 100, 4096, pytest.param(14336, marks=pytest.mark.slow)]
needs_float8 = pytest.mark.skipif(
    CUDA and torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU of compute capability 8.9"
)


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


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_reference(kind, tokens, width, dtype):
    x = KINDS[kind](tokens, width, dtype).to(DEVICE)
    assert torch.equal(bits(round_values(x)), bits(round_inputs(x).values))


@needs_float8
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_fp8_and_scales_are_those_of_the_reference(kind, tokens, width, dtype):
    x = KINDS[kind](tokens, width, dtype).to(DEVICE)
    narrow, scale = round_to_float8(x)
    values, expected_scale = round_inputs(x)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(bits(narrow), bits((values.float() / expected_scale).to(torch.float8_e4m3fn)))


@pytest.mark.parametrize("dtype", HALF)
def test_the_widest_tokens_are_rounded(dtype):
    x = random(2, MAX_ROUNDED_WIDTH, dtype).to(DEVICE)
    assert torch.equal(bits(round_values(x)), bits(round_inputs(x).values))


@pytest.mark.parametrize("dtype", HALF)
def test_what_is_not_a_number_stays_so(dtype):
    x = torch.tensor([[float("nan"), 1.0], [1.0, 2.0]], dtype=dtype, device=DEVICE)
    values = round_values(x)
    assert bool(values[0, 0].isnan())
    assert torch.equal(values[1], x[1])


@needs_float8
@pytest.mark.skipif(not CUDA, reason="the interpreter makes a number of it")
def test_what_is_not_a_number_stays_so_in_fp8():
    x = torch.tensor([[float("nan"), 1.0], [1.0, 2.0]], dtype=HALF[-1], device=DEVICE)
    narrow, scale = round_to_float8(x)
    assert bool(narrow[0, 0].isnan())
    assert torch.equal(narrow[1].float() * scale[1], x[1].float())


@pytest.mark.parametrize("shape", [(96,), (0, 96), (2, 3, 96)])
def test_inputs_may_have_any_shape(shape):
    x = torch.randn(shape).to(DEVICE, HALF[0])
    assert torch.equal(round_values(x), round_inputs(x).values)


@needs_float8
@pytest.mark.parametrize("shape", [(96,), (0, 96), (2, 3, 96)])
def test_fp8_and_scales_have_the_shape_of_the_inputs(shape):
    narrow, scale = round_to_float8(torch.randn(shape).to(DEVICE, HALF[0]))
    assert narrow.shape == shape
    assert scale.shape == (*shape[:-1], 1)


@pytest.mark.parametrize("apart", [slice(None, None, 2), slice(7, 55)])
def test_numbers_of_a_token_may_be_apart(apart):
    x = random(3, 96, HALF[0]).to(DEVICE)[:, apart]
    assert torch.equal(bits(round_values(x)), bits(round_inputs(x).values))
