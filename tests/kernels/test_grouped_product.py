"""Products with grouped weights by the GPU's kernel equal those with the dequantised weight, bit for bit in it.

Without a GPU, the kernel is compiled for the CPU, with functions that do what instructions of a GPU do.
"""

import shutil

import pytest
import torch

pytest.importorskip("triton")

from helpers.attention import DEVICE
from helpers.emulated_gpu import EmulatedKernel
from helpers.models import assert_close_by_scale
from redrafter.kernels import launch
from redrafter.kernels.cuda import grouped_product
from redrafter.kernels.cuda.grouped_product import WeightTiling, multiply
from redrafter.kernels.grouped_linear import grouped_linear, in_one_order
from redrafter.kernels.grouped_weight import GroupedWeight, quantize_groups

CUDA = DEVICE == "cuda"
CLOSE = {torch.float16: 1e-3, torch.bfloat16: 6e-3, torch.float32: 1e-5}  # part of the largest number
# Bits, output and input features, input features per group, dtypes of scales and of minima.
FORMS = {
    "4 bits": (4, 40, 1024, 32, torch.float16, torch.float16),
    "4 bits of float32": (4, 300, 512, 64, torch.float32, torch.float32),
    "4 bits, large groups": (4, 40, 1024, 256, torch.float16, torch.float16),
    "4 bits without minima, part of a tile": (4, 40, 544, 32, torch.float16, None),
    "4 bits, a group of no power of two": (4, 40, 192, 96, torch.float16, torch.float16),
    "8 bits": (8, 40, 512, 16, torch.float16, None),
    "8 bits, two blocks in a group": (8, 40, 512, 32, torch.float16, torch.float16),
    "8 bits, a group per row": (8, 40, 208, 208, torch.float16, torch.float32),
}
ON_CPU = ("4 bits", "4 bits without minima, part of a tile")  # the others take a compilation of seconds each
each_form = pytest.mark.parametrize(
    ("bits", "features", "inner", "group", "scale", "minimum"),
    [
        pytest.param(*form, id=name, marks=[] if CUDA or name in ON_CPU else pytest.mark.variant)
        for name, form in FORMS.items()
    ],
)
on_gpu = pytest.mark.skipif(not CUDA, reason="needs a GPU")


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    if CUDA:
        return
    if shutil.which("g++") is None:
        pytest.skip("needs a GPU or g++")
    monkeypatch.setattr(grouped_product, "Kernel", EmulatedKernel)
    monkeypatch.setattr(grouped_product, "_multiprocessors", lambda device: 3)


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def quantized(bits, features, inner, group, scale=torch.float16, minimum=torch.float16):
    """Return a weight that has every code."""
    weight = quantize_groups(random(features, inner, seed=1), bits, group)
    least = 0.3 * random(*weight.scale.shape, seed=2)
    return GroupedWeight(weight.codes, weight.scale.to(scale), None if minimum is None else least.to(minimum))


def check(x, weight, bias=None, tiling=None):
    found = multiply(x, weight, bias, tiling)
    assert found.dtype == x.dtype
    full = x.double() @ weight.dequantize().double().T
    assert_close_by_scale(found.double(), full if bias is None else full + bias.double(), CLOSE[x.dtype])


@each_form
@pytest.mark.parametrize("dtype", CLOSE if CUDA else [torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 26, 64, 70] if CUDA else [3])
def test_a_product_equals_that_of_the_dequantised_weight(tokens, dtype, bits, features, inner, group, scale, minimum):
    weight = quantized(bits, features, inner, group, scale, minimum)
    check(random(tokens, inner, dtype=dtype), weight)


@pytest.mark.variant
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_inputs_of_other_dtypes_are_not_rounded(dtype):
    check(random(2, 256, dtype=dtype), quantized(4, 33, 256, 32), random(33, seed=3))


@pytest.mark.parametrize("dtype", CLOSE if CUDA else [torch.bfloat16])
def test_how_many_tokens_there_are_changes_no_bit_of_one(dtype):
    """Each number of tokens has a tiling of its own, and the last programs of a tile add up its parts."""
    features, inner = (4096, 4096) if CUDA else (33, 512)
    x, weight = random(200 if CUDA else 9, inner, dtype=dtype), quantized(4, features, inner, 32)
    many = multiply(x, weight)
    for tokens in (1, 17, 33, 65) if CUDA else (1,):
        assert torch.equal(multiply(x[:tokens], weight), many[:tokens])


def test_parts_of_the_input_features_may_be_empty():
    check(random(2, 512, dtype=torch.bfloat16), quantized(4, 33, 512, 32), tiling=WeightTiling(4, 3, 1, 3))


def test_parts_of_a_weight_that_are_apart_are_multiplied():
    weight = quantized(4, 64, 512, 32)
    half = GroupedWeight(weight.codes[:, :128], weight.scale[:, :8], weight.minimum[:, :8])
    x = random(513, dtype=torch.bfloat16)[1:].view(2, 256)
    for part in (half, weight.columns(slice(256, 512)), weight.columns(slice(32, 288))):
        check(x, part)


@on_gpu
@each_form
@pytest.mark.parametrize("dtype", CLOSE)
def test_weights_are_the_numbers_that_are_dequantised(dtype, bits, features, inner, group, scale, minimum):
    """Each input feature alone shows a number; tensor cores cut off the last bit of a sum, instead of rounding it."""
    weight = quantized(bits, features, inner, group, scale, minimum)
    found, expected = multiply(torch.eye(inner, dtype=dtype, device=DEVICE), weight).T.double(), weight.dequantize()
    rounding = torch.finfo(dtype).eps * 0.501 + 2e-7
    assert ((found - expected.double()).abs() <= rounding * expected.abs().double() + 1e-6 * expected.abs().max()).all()


@on_gpu
@pytest.mark.parametrize(("bits", "dtype"), [(4, torch.bfloat16), (8, torch.float16), (4, torch.float32)])
def test_many_tokens_change_no_bit_where_products_have_one_order(bits, dtype):
    x, weight = random(1000, 4096, dtype=dtype), quantized(bits, 1024, 4096, 32)
    parts = weight.codes, weight.scale, weight.minimum, None
    with in_one_order():
        many = grouped_linear(x, *parts)
    assert torch.equal(many[:1], grouped_linear(x[:1], *parts))
    full = x.double() @ weight.dequantize(dtype).double().T
    assert_close_by_scale(grouped_linear(x, *parts).double(), full, CLOSE[dtype])


@on_gpu
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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_product_is_computed_on_a_gpu_that_is_not_the_current_one():
    x, weight = random(3, 1024, dtype=torch.bfloat16), quantized(4, 40, 1024, 128, minimum=None)
    other = GroupedWeight(weight.codes.to("cuda:1"), weight.scale.to("cuda:1"))
    assert torch.equal(multiply(x.to("cuda:1"), other).cpu(), multiply(x, weight).cpu())
    assert torch.cuda.current_device() == 0


def test_each_gpu_is_asked_whether_it_runs_the_kernel(monkeypatch):
    monkeypatch.setattr(grouped_product, "compiler", object)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(launch, "_capability", ((9, 0), (7, 5)).__getitem__)
    for current in (0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        found = [grouped_product.is_available(torch.device(name)) for name in ("cuda:0", "cuda:1", "cuda")]
        assert found == [True, False, current == 0]
