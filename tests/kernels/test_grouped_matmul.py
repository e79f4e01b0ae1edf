"""Products with grouped weights: the kernels equal torch's product with the dequantised weight, bit for bit in it."""

import pytest
import torch

pytest.importorskip("triton")

from helpers.attention import DEVICE
from helpers.models import assert_close_by_scale
from redrafter.kernels import grouped_matmul
from redrafter.kernels.grouped_linear import grouped_linear, in_one_order
from redrafter.kernels.grouped_matmul import grouped_product, widen_grouped
from redrafter.kernels.grouped_weight import GroupedWeight, quantize_groups
from redrafter.kernels.launch import Tiling

CUDA = DEVICE == "cuda"
HALF = [torch.float16, torch.bfloat16] if CUDA else [torch.float16]  # the interpreter cannot multiply bfloat16
CLOSE = {torch.float16: 1e-3, torch.bfloat16: 6e-3, torch.float32: 1e-5}  # part of the largest number
# Bits, output and input features, input features per group.
FORMS = {
    "4 bits": (4, 33, 160, 32),
    "4 bits, whole tiles": (4, 64, 128, 64),
    "4 bits, a group of no power of two": (4, 33, 192, 96),
    "4 bits, a group per row": (4, 33, 288, 288),
    "8 bits": (8, 33, 96, 16),
    "8 bits, whole tiles": (8, 64, 64, 32),
    "8 bits, a group per row": (8, 33, 208, 208),
}
each_form = pytest.mark.parametrize(("bits", "features", "inner", "group"), FORMS.values(), ids=FORMS)


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def quantized(bits, features, inner, group, dtype=torch.float16, minimum=True):
    """Return a weight that has every code, with scales of a dtype."""
    weight = quantize_groups(random(features, inner, seed=1), bits, group)
    least = 0.3 * random(*weight.scale.shape, seed=2) if bits == 8 and minimum else weight.minimum
    return GroupedWeight(weight.codes, weight.scale.to(dtype), None if least is None else least.to(dtype))


def full(x, weight, bias=None):
    out = x.double() @ weight.dequantize(x.dtype).double().T
    return out if bias is None else out + bias.double()


def check(x, weight, bias=None, tiling=None):
    found = grouped_product(x, weight, bias, tiling)
    assert found.dtype == x.dtype
    assert_close_by_scale(found.double(), full(x, weight, bias), CLOSE[x.dtype])


@each_form
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("tokens", [1, pytest.param(26, marks=[] if CUDA else pytest.mark.variant), 70])
def test_a_product_equals_that_of_the_dequantised_weight(tokens, dtype, bits, features, inner, group):
    weight = quantized(bits, features, inner, group, torch.float16 if tokens == 1 else torch.float32)
    check(random(tokens, inner, dtype=dtype), weight, random(features, dtype=dtype, seed=3) if tokens > 1 else None)


@each_form
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize(("scales", "minimum"), [(torch.float16, True), (torch.float32, False)])
def test_weights_are_the_numbers_that_are_dequantised(scales, minimum, dtype, bits, features, inner, group):
    """Each input feature alone shows the numbers that a product has in its registers."""
    weight = quantized(bits, features, inner, group, scales, minimum)
    expected = weight.dequantize(dtype)
    assert torch.equal(widen_grouped(weight, dtype), expected)
    if CUDA:  # many products, which the interpreter is too slow for
        assert torch.equal(grouped_product(torch.eye(inner, dtype=dtype, device=DEVICE), weight).T, expected)


@pytest.mark.parametrize("dtype", HALF)
def test_parts_of_the_input_features_add_up(dtype):
    """Parts are counted from zero in the second product; some of its seven parts are empty."""
    weight = quantized(4, 33, 1120, 32)
    x, bias = random(20, 1120, dtype=dtype), random(33, dtype=dtype, seed=3)
    for tiling in (Tiling(16, 64, 64, 3, 2, 2), Tiling(32, 32, 128, 3, 2, 7)):
        check(x, weight, bias, tiling)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("bits", "features", "inner"),
    [
        (4, 33, 96),
        pytest.param(8, 33, 96, marks=[] if CUDA else pytest.mark.variant),
        *([(4, 4096, 4096)] if CUDA else []),
    ],
)
def test_how_many_tokens_there_are_changes_no_bit_of_one(bits, features, inner, dtype):
    """Each number of tokens has a tiling of its own; the interpreter's products have an order for each tile."""
    x, weight = random(200, inner, dtype=dtype), quantized(bits, features, inner, 32)
    many = grouped_product(x, weight)
    for tokens in (1, 17, 33, 65):
        few = grouped_product(x[:tokens], weight)
        assert torch.equal(few, many[:tokens]) if CUDA else torch.allclose(few, many[:tokens], atol=0.02)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize(("bits", "dtype"), [(4, torch.bfloat16), (8, torch.float16), (4, torch.float32)])
def test_many_tokens_change_no_bit_where_products_have_one_order(bits, dtype):
    x, weight = random(1000, 4096, dtype=dtype), quantized(bits, 1024, 4096, 32)
    parts = weight.codes, weight.scale, weight.minimum, None
    with in_one_order():
        many = grouped_linear(x, *parts)
    assert torch.equal(many[:1], grouped_linear(x[:1], *parts))
    assert_close_by_scale(grouped_linear(x, *parts).double(), full(x, weight), CLOSE[dtype])


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_a_product_is_one_operator_of_a_compiled_and_captured_forward():
    x, weight = random(26, 256, dtype=torch.bfloat16), quantized(4, 128, 256, 32)

    def forward(x):
        return grouped_linear(2 * x, weight.codes, weight.scale, weight.minimum, None).relu()

    expected, compiled, graph = forward(x), torch.compile(forward, fullgraph=True), torch.cuda.CUDAGraph()
    assert torch.equal(compiled(x), expected)
    with torch.cuda.graph(graph):
        out = compiled(x)
    for tokens in (x, x.flip(0)):
        expected = forward(tokens)
        x.copy_(tokens)
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", HALF)
def test_many_tokens_are_multiplied_in_turn_where_counters_of_tiles_would_not_do(dtype, monkeypatch):
    x, weight = random(70, 544, dtype=dtype), quantized(4, 33, 544, 32)
    tiling, grids, kernel = Tiling(16, 64, 64, 3, 2, 2), [], grouped_matmul._grouped_product_kernel  # noqa: SLF001
    whole = grouped_product(x, weight, None, tiling)

    class Recorded:
        def __getitem__(self, grid):
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(grouped_matmul, "_grouped_product_kernel", Recorded())
    monkeypatch.setattr(grouped_matmul, "MAX_SPLIT_TILES", 2)
    assert torch.equal(grouped_product(x, weight, None, tiling), whole)
    assert grids == [(2, 1, 2), (2, 1, 2), (1, 1, 2)]


def test_parts_of_a_weight_that_are_apart_are_multiplied():
    weight = quantized(4, 64, 256, 32)
    half = GroupedWeight(weight.codes[:, :64], weight.scale[:, :4], weight.minimum[:, :4])
    check(random(3, 128, dtype=torch.float16), half)
    assert torch.equal(widen_grouped(half, torch.float16), half.dequantize(torch.float16))
