"""Products with FP8 weights: the kernels and the operator equal those of the same numbers in full precision."""

import pytest
import torch

pytest.importorskip("triton")

from torch.nn.functional import linear

from helpers.attention import DEVICE
from helpers.models import assert_close_by_scale
from redrafter.kernels import float8_matmul
from redrafter.kernels.float8_inputs import round_inputs
from redrafter.kernels.float8_matmul import float8_product
from redrafter.kernels.float8_rounding import MAX_ROUNDED_WIDTH, round_to_float8
from redrafter.kernels.launch import Tiling
from redrafter.kernels.linear import widen_float8, widened_product
from redrafter.kernels.linear_operators import float8_linear

CUDA = DEVICE == "cuda"
HALF = [torch.float16, torch.bfloat16] if CUDA else [torch.float16]  # the interpreter cannot multiply bfloat16
ROWS = [1, 26, 64, 200]
SIZES = [(256, 128), (100, 70), (33, 129)] + ([(4096, 6144), (14336, 4096)] if CUDA else [])
CLOSE = {torch.float16: 1e-3, torch.bfloat16: 6e-3, torch.float32: 1e-5}  # part of the largest number


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def quantized(features, inner):
    """Return a weight of FP8 in which every number of FP8 is likely to be, and scales of its rows."""
    bits = torch.randint(0, 256, (features, inner), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    bits[(bits & 0x7F) == 0x7F] = 0  # not a number
    return bits.view(torch.float8_e4m3fn).to(DEVICE), (random(features, seed=2).abs() + 0.1) / 64


def full(x, weight, scale, bias=None):
    return linear(x.float(), weight.float() * scale[:, None], None if bias is None else bias.float())


def as_float8(x, weight, scale, bias=None, tiling=None):
    return float8_product(*round_to_float8(x), weight, scale, bias, x.dtype, tiling)


# Products, and what they do to their inputs.
PRODUCTS = {"as FP8": (as_float8, lambda x: round_inputs(x).values), "widened": (widened_product, lambda x: x)}
each_product = pytest.mark.parametrize(("multiply", "seen"), PRODUCTS.values(), ids=PRODUCTS)


@each_product
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("inner", "features"), SIZES)
@pytest.mark.parametrize("rows", ROWS)
def test_a_product_equals_that_of_the_full_weight(rows, inner, features, dtype, multiply, seen):
    x, (weight, scale) = random(rows, inner, dtype=dtype), quantized(features, inner)
    found = multiply(x, weight, scale, None)
    assert_close_by_scale(found.float(), full(seen(x), weight, scale), CLOSE[dtype])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "tiling", [Tiling(16, 64, 128, 3, 4, 4), Tiling(64, 128, 128, 3, 8, 2), Tiling(32, 64, 128, 3, 4, 7)], ids=str
)
def test_parts_of_the_input_features_add_up(tiling, dtype):
    """Weights of whole steps and others are multiplied; seven parts of their steps leave some parts empty."""
    for inner, features in ((1100, 70), (1024, 128)):
        x, (weight, scale) = random(26, inner, dtype=dtype), quantized(features, inner)
        bias = random(features, dtype=dtype, seed=3)
        for multiply, seen in (*PRODUCTS.values(), PRODUCTS["as FP8"]):  # the counts are 0 again
            found = multiply(x, weight, scale, bias, tiling)
            assert_close_by_scale(found.float(), full(seen(x), weight, scale, bias), CLOSE[dtype])


@each_product
@pytest.mark.parametrize("columns", [slice(64), slice(64, None), slice(7, 50)])
def test_some_columns_of_a_weight_are_multiplied_where_they_are(columns, multiply, seen):
    weight, scale = quantized(70, 160)
    weight = weight[:, columns]
    x = random(7, weight.shape[1], dtype=torch.float16)
    assert_close_by_scale(multiply(x, weight, scale, None).float(), full(seen(x), weight, scale), 1e-3)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("inner", "features"), [(100, 70), pytest.param(2048, 128, marks=[] if CUDA else pytest.mark.variant)]
)
def test_how_many_tokens_there_are_changes_no_bit_of_one(inner, features, dtype):
    """Each number of tokens has a tiling of its own; the interpreter's products have an order for each tile."""
    x, (weight, scale) = random(200, inner, dtype=dtype), quantized(features, inner)
    many = as_float8(x, weight, scale)
    for tokens in (1, 17, 33, 65):
        few = as_float8(x[:tokens], weight, scale)
        assert torch.equal(few, many[:tokens]) if CUDA else torch.allclose(few, many[:tokens], atol=0.02)


@pytest.mark.parametrize("dtype", HALF)
def test_many_tokens_are_multiplied_in_turn_where_counters_of_tiles_would_not_do(dtype, monkeypatch):
    x, (weight, scale) = random(70, 1024, dtype=dtype), quantized(128, 1024)
    tiling, grids, kernel = Tiling(16, 64, 128, 3, 4, 2), [], float8_matmul._float8_product_kernel  # noqa: SLF001
    whole = as_float8(x, weight, scale, None, tiling)

    class Recorded:
        def __getitem__(self, grid):
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(float8_matmul, "_float8_product_kernel", Recorded())
    monkeypatch.setattr(float8_matmul, "MAX_SPLIT_TILES", 4)
    assert torch.equal(as_float8(x, weight, scale, None, tiling), whole)
    assert grids == [(2, 2, 2), (2, 2, 2), (1, 2, 2)]


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_a_table_of_an_8b_drafter_is_multiplied_with_a_part_of_its_weight():
    weight, scale = quantized(8192, 3 * 4096)
    x, part = random(8192, 4096, dtype=torch.bfloat16), weight[:, :4096]
    assert torch.equal(as_float8(x, part, scale)[-26:], as_float8(x[-26:], part, scale))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_is_widened_exactly(dtype):
    weight, scale = quantized(70, 2100)
    scale = 2.0 ** torch.randint(-6, 3, scale.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    assert torch.equal(widen_float8(weight, scale, dtype), (weight.float() * scale[:, None]).to(dtype))
    assert torch.equal(widen_float8(weight[:, 3:], scale, dtype).float(), weight[:, 3:].float() * scale[:, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(100,), (3, 100), (2, 5, 100), (1, 300, 100), (0, 100)])
@pytest.mark.parametrize("biased", [False, True])
def test_the_operator_takes_inputs_of_any_shape(shape, biased, dtype):
    x, (weight, scale) = random(*shape, dtype=dtype), quantized(70, 100)
    bias = random(70, dtype=dtype, seed=3) if biased else None
    found = float8_linear(x, weight, scale, bias)
    assert found.dtype == dtype
    assert found.shape == (*shape[:-1], 70)
    if found.numel():
        assert_close_by_scale(found.float(), full(round_inputs(x).values, weight, scale, bias), CLOSE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("inner", "features"), [(96, 80), (100, 70), (96, 70), (4096, 512)])
@pytest.mark.parametrize("tokens", [0, 1, 5, 32, 33, 100, 300])
def test_inputs_that_are_rounded_are_multiplied_as_such(tokens, inner, features, biased, dtype):
    """The number of tokens, the dtype, the sizes and the GPU choose among products that are one but for rounding."""
    x, (weight, scale) = random(1, tokens, inner, dtype=dtype), quantized(features, inner)
    scale = 2.0 ** scale.log2().round()
    bias = random(features, dtype=dtype, seed=3) if biased else None
    found = float8_linear(x, weight, scale, bias)
    assert found.dtype == dtype
    assert found.shape == (1, tokens, features)
    if found.numel():
        rounded = round_inputs(x).values.double()
        expected = linear(rounded, weight.double() * scale.double()[:, None], None if bias is None else bias.double())
        assert_close_by_scale(found.double(), expected, CLOSE[dtype])


@pytest.mark.parametrize(
    ("tokens", "columns", "inner", "features"),
    [(40, slice(32, 96), 160, 64), *((tokens, slice(None), MAX_ROUNDED_WIDTH + 16, 16) for tokens in (3, 40))],
    ids=["a part of a weight", "few that are wider than a program takes", "many that are wider"],
)
def test_rounded_inputs_are_multiplied_with_a_part_of_a_weight_and_where_they_are_wide(
    tokens, columns, inner, features
):
    weight, scale = quantized(features, inner)
    weight = weight[:, columns]
    x = random(tokens, weight.shape[1], dtype=torch.bfloat16)
    found = float8_linear(x, weight, scale, None)
    assert_close_by_scale(found.float(), full(round_inputs(x).values, weight, scale), CLOSE[torch.bfloat16])


def test_the_operator_is_traced_as_one():
    x, (weight, scale) = random(2, 3, 100), quantized(70, 100)
    torch.library.opcheck(float8_linear, (x, weight, scale, None), test_utils="test_faketensor")
