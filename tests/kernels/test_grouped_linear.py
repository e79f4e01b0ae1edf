"""Products of grouped weights: the operator, and the CPU's kernel compared with the reference."""

import stat
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import linear

from redrafter.errors import ReDrafterWarning
from redrafter.kernels.cpu import compiled, grouped_product
from redrafter.kernels.grouped_linear import grouped_linear, is_fast, multiply_grouped, widened_linear
from redrafter.kernels.grouped_weight import GroupedWeight, quantize_groups

needs_kernel = pytest.mark.skipif(grouped_product.find_kernel() is None, reason="needs a C compiler")


def make_weight(bits, features=20, inner=128, group=32, minimum=True, wide=False):
    weight = quantize_groups(torch.randn(features, inner), bits, group)
    least = weight.scale * torch.randn(weight.scale.shape).to(weight.scale.dtype) if minimum else None
    scale = weight.scale.float() * 1.001 if wide else weight.scale
    return GroupedWeight(weight.codes, scale, least)


def parts(weight):
    return weight.codes, weight.scale, weight.minimum


def check(weight, x, bias=None, multiply=multiply_grouped):
    out, wide = multiply(x, *parts(weight), bias), weight.dequantize().double()
    exact = linear(x.double(), wide, None if bias is None else bias.double())
    assert out.dtype == x.dtype
    # The sum of absolute values bounds what rounding may change, in float32 by half a unit for each of 100 numbers.
    size = linear(x.double().abs(), wide.abs()) + 1
    assert bool(((out - exact).abs() <= size * max(torch.finfo(x.dtype).eps, 1e-6)).all())


def test_the_product_is_that_of_the_dequantised_weight():
    weight, x, bias = make_weight(4), torch.randn(2, 3, 128), torch.randn(20)
    for multiply in (grouped_linear, multiply_grouped, widened_linear):
        check(weight, x, bias, multiply)


@needs_kernel
@pytest.mark.parametrize("minimum", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (4, 128), (8, 16), (8, 32), (8, 128)])
def test_a_cpus_kernel_computes_any_number_of_tokens(bits, group, minimum):
    torch.manual_seed(0)
    weight = make_weight(bits, 22, 384, group, minimum)
    for tokens in (*range(1, 20), 40, 64, 65, 100):
        check(weight, torch.randn(tokens, 384), torch.randn(22) if tokens % 2 else None)


@needs_kernel
@pytest.mark.parametrize("bits", [4, 8])
def test_a_cpus_kernel_computes_any_size_and_dtype(bits):
    torch.manual_seed(0)
    for features, inner in ((4, 32), (5, 96), (7, 160), (66, 32), (3, 64)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            weight = make_weight(bits, features, inner, 32, wide=inner == 96)
            check(weight, torch.randn(2, 5, inner).to(dtype), torch.randn(features).to(dtype))
            check(weight, torch.randn(66, inner).to(dtype))
    weight = make_weight(bits)
    x = torch.randn(128, 6).t()
    assert torch.equal(multiply_grouped(x, *parts(weight), None), multiply_grouped(x.clone(), *parts(weight), None))
    assert multiply_grouped(x[:0], *parts(weight), None).shape == (0, 20)


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_not_in_a_weights_memory_is_never_read(bits):
    weight, x = make_weight(bits), torch.randn(3, 128)
    for wrong in (torch.randn(3, 64), torch.randn(3, 256)):
        with pytest.raises(RuntimeError, match="shapes"):
            multiply_grouped(wrong, *parts(weight), None)
    with pytest.raises(RuntimeError):
        multiply_grouped(x, *parts(weight), torch.randn(7))
    multiply_grouped(x, *(part.to("meta") for part in parts(weight)), None)  # would end the process
    strided = weight.codes.t().contiguous().t()
    check(GroupedWeight(strided, weight.scale, weight.minimum), x)


@needs_kernel
@pytest.mark.parametrize("bits", [4, 8])
def test_the_bits_of_a_token_depend_neither_on_other_tokens_nor_on_threads(bits):
    torch.manual_seed(0)
    weight, x = make_weight(bits, 1030, 256), torch.randn(64, 256)
    alone = torch.cat([multiply_grouped(token[None], *parts(weight), None) for token in x])
    for tokens in (2, 3, 4, 5, 6, 7, 8, 11, 13, 32, 64):
        assert torch.equal(multiply_grouped(x[:tokens], *parts(weight), None), alone[:tokens])
    wide, many = make_weight(bits, 8, 16384), torch.randn(40, 16384)  # whose inputs a thread reads in parts
    assert torch.equal(multiply_grouped(many, *parts(wide), None)[-1:], multiply_grouped(many[-1:], *parts(wide), None))
    torch.set_num_threads(2)
    try:
        assert torch.equal(multiply_grouped(x, *parts(weight), None), alone)
        assert torch.equal(multiply_grouped(x[:1], *parts(weight), None), alone[:1])
    finally:
        torch.set_num_threads(1)


@needs_kernel
def test_weights_of_many_numbers_are_dequantised_in_tiles_for_many_tokens(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(grouped_product, "MAX_TILE", 6 * 128)
    check(make_weight(8), torch.randn(70, 128), torch.randn(20))


def test_the_operator_is_called_where_gradients_are_needed():
    weight, x = make_weight(4), torch.randn(3, 128, requires_grad=True)
    with pytest.raises(RuntimeError, match="grouped_linear"):
        multiply_grouped(x, *parts(weight), None).sum().backward()


def test_compiled_code_has_the_same_product():
    weight, x = make_weight(4), torch.randn(3, 128)
    compiled_product = torch.compile(multiply_grouped, backend="eager", fullgraph=True)
    assert torch.equal(compiled_product(x, *parts(weight), None), multiply_grouped(x, *parts(weight), None))


@pytest.fixture
def empty_home(monkeypatch, tmp_path):
    monkeypatch.setenv("REDRAFTER_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CC", raising=False)
    for function in (compiled.load_library, grouped_product.find_kernel):
        function.cache_clear()
    yield tmp_path / "home" / "kernels"
    for function in (compiled.load_library, grouped_product.find_kernel):
        function.cache_clear()


@needs_kernel
@pytest.mark.slow
@pytest.mark.parametrize("lanes", [8, 16])
def test_vectors_of_either_width_give_the_same_products(lanes, empty_home, monkeypatch):
    monkeypatch.setenv("CC", f"cc -DLANES={lanes}")
    for bits, group in ((4, 32), (8, 16)):
        test_the_bits_of_a_token_depend_neither_on_other_tokens_nor_on_threads(bits)
        for tokens in (1, 4, 7, 12):
            check(make_weight(bits, 22, 384, group), torch.randn(tokens, 384))


@pytest.mark.parametrize("compiler", ["none", "failing"])
def test_without_a_compiler_a_product_is_widened_after_one_warning(compiler, empty_home, monkeypatch, tmp_path):
    if compiler == "none":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        script = tmp_path / "cc"
        script.write_text("#!/bin/sh\necho it is broken >&2\nexit 1\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("CC", str(script))
    weight, x = make_weight(4), torch.randn(3, 128)
    with pytest.warns(ReDrafterWarning, match="it is broken" if compiler == "failing" else "none of cc, gcc") as caught:
        assert not is_fast("cpu")
        assert torch.equal(multiply_grouped(x, *parts(weight), None), widened_linear(x, *parts(weight), None))
    assert len(caught) == 1


@needs_kernel
def test_a_library_that_lacks_the_function_is_not_kept(empty_home, monkeypatch, tmp_path):
    source, other = tmp_path / "five.c", tmp_path / "other.c"
    other.write_text("int other(void) { return 6; }")
    source.write_text("int five(void) { return 5; }")
    script = tmp_path / "cc"
    script.write_text(f'#!/bin/sh\nshift 4\nexec cc -shared -fPIC "$1" "$2" {other}\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(script))
    with pytest.warns(ReDrafterWarning, match="a library without five"):
        assert compiled.load_library(source) is None
    assert not empty_home.exists()


@needs_kernel
def test_a_damaged_library_is_compiled_again(empty_home, monkeypatch, tmp_path):
    source = tmp_path / "three.c"
    source.write_text("int three(void) { return 3; }")
    assert compiled.load_library(source).three() == 3
    (kept,) = empty_home.iterdir()
    monkeypatch.setenv("REDRAFTER_HOME", str(tmp_path / "second"))  # as a library is loaded from a path only once
    damaged = tmp_path / "second" / "kernels" / kept.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(kept.read_bytes()[:1000])
    compiled.load_library.cache_clear()
    assert compiled.load_library(source).three() == 3
    assert damaged.read_bytes() == kept.read_bytes()


@needs_kernel
def test_a_library_is_used_where_it_cannot_be_kept(empty_home, tmp_path):
    empty_home.parent.touch()
    source = tmp_path / "four.c"
    source.write_text("int four(void) { return 4; }")
    assert compiled.load_library(source).four() == 4


PROGRAM = r"""
import os, re, torch
from redrafter.kernels.grouped_linear import is_fast, multiply_grouped
from redrafter.kernels.grouped_weight import quantize_groups

assert is_fast("cpu")
torch.set_num_threads(2)
x, weight = torch.randn(512, 512), quantize_groups(torch.randn(2048, 512), 4)
x.exp()
threads = len(os.listdir("/proc/self/task"))
multiply_grouped(x[:1], weight.codes, weight.scale, weight.minimum, None)
maps = open("/proc/self/maps").read()
print(len(set(re.findall(r"/\S*[gi]omp\S*", maps))), len(os.listdir("/proc/self/task")) - threads)
"""


@needs_kernel
@pytest.mark.variant
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
def test_processes_may_compile_at_once_and_have_one_pool_of_threads(empty_home):
    started = [subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate()[0].strip() for process in started]
    assert len(list(empty_home.iterdir())) == 1
    assert printed == ["1 0", "1 0"]  # libraries of OpenMP, and threads that it has added
