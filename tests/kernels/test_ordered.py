"""Kernels whose sums have one order: equal to their references, and the same bits however a token comes."""

from importlib import import_module

import pytest
import torch

pytest.importorskip("triton")

from torch.nn.functional import linear

from helpers.attention import DEVICE
from helpers.models import assert_close_by_scale
from helpers.token_forms import FORMS, SETTINGS, TokenForms
from redrafter.kernels import ordered_linear as torch_order
from redrafter.kernels.attention_inputs import FAR_SPLIT, NEAR, NEAR_SPLIT, TILE
from redrafter.kernels.launch import Tiling
from redrafter.kernels.ordered_attention import ordered_attention
from redrafter.kernels.ordered_linear import ordered_expert_linear, ordered_linear

CUDA = DEVICE == "cuda"
HALF = [torch.float16, torch.bfloat16] if CUDA else [torch.float16]  # the interpreter cannot multiply bfloat16
ROWS = [1, 2, 7, 26, 64, 200, 256] if CUDA else [1, 26, 70]
TEXTS = [(62, torch.float32), (300, torch.float16)]  # tokens before those that are compared
if CUDA:
    TEXTS += [(n, dtype) for n in (3, 62, 64, 126, 300, 4094, 5000) for dtype in (*HALF, torch.float32)]
TILINGS = [Tiling(16, 32, 64, 2, 4), Tiling(64, 64, 128, 3, 4), Tiling(128, 128, 64, 4, 8)]
ATTENTION = TokenForms(ordered_attention, torch.device(DEVICE))


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_same_bits(found, expected):
    """Fail unless the numbers are the same on a GPU; the interpreter's products depend on the place in a tile."""
    if CUDA:
        assert torch.equal(found, expected)
    else:
        assert_close_by_scale(found, expected, 1e-3 if found.dtype == torch.float16 else 1e-6)


def cancelling(tokens, inner, features, dtype):
    """Return inputs and a weight whose products are 0 but for rounding, which shows the order of every sum."""
    x, weight = random(tokens, inner // 2, dtype=dtype), random(features, inner // 2, dtype=dtype, seed=1)
    return torch.cat([x, -x], dim=1), torch.cat([weight, weight], dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "inner", "features"), [(1, 128, 64), (26, 100, 70), (70, 256, 33)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_equals_that_of_torch(tokens, inner, features, biased, dtype):
    x, weight = random(tokens, inner, dtype=dtype), random(features, inner, dtype=dtype, seed=1)
    bias = random(features, dtype=dtype, seed=2) if biased else None
    expected = linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert_close_by_scale(ordered_linear(x, weight, bias).float(), expected, 1e-3 if dtype == torch.float16 else 1e-5)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("tiling", TILINGS)
def test_the_number_of_tokens_changes_no_bit(tiling, dtype):
    x, weight = cancelling(max(ROWS), 256, 160, dtype)
    whole = ordered_linear(x, weight, None, tiling)
    for tokens in ROWS:
        assert torch.equal(ordered_linear(x[:tokens], weight, None, tiling), whole[:tokens])


@pytest.mark.skipif(not CUDA, reason="the interpreter multiplies tiles of other sizes in other orders")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("tiling", [None, *TILINGS])
def test_the_tiling_changes_no_bit(tiling, dtype):
    x, weight = cancelling(max(ROWS), 4096, 160, dtype)
    whole = ordered_linear(x, weight, None, TILINGS[0])
    for tokens in ROWS:
        assert torch.equal(ordered_linear(x[:tokens], weight, None, tiling), whole[:tokens])


def in_two_parts(x, weight, bias):
    """Return the product by sums that are cut at a quarter."""
    cut = x.shape[1] // 4
    total = linear(x[:, :cut].float(), weight[:, :cut].float()) + linear(x[:, cut:].float(), weight[:, cut:].float())
    return (total if bias is None else total + bias).to(x.dtype)


@pytest.mark.skipif(not CUDA, reason="what torch's product on a GPU is compared with runs there alone")
@pytest.mark.parametrize(("multiply", "kept"), [(in_two_parts, False), (ordered_linear, True)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("inner", [32, 4096])
@pytest.mark.parametrize("dtype", HALF)
def test_a_product_in_another_order_is_not_used(monkeypatch, dtype, inner, biased, multiply, kept):
    monkeypatch.setattr(torch_order, "_KNOWN", {})
    monkeypatch.setattr(torch_order, "torch_linear", multiply)
    # Whatever the weight is: of zeros, every order gives the same.
    weight, bias = torch.zeros(64, inner, device=DEVICE, dtype=dtype), torch.zeros(64, device=DEVICE, dtype=dtype)
    x = random(26, inner, dtype=dtype)
    assert torch_order.torch_keeps_order(x, weight, bias if biased else None) == kept


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 41])
def test_a_row_of_an_expert_has_the_bits_of_a_product_with_that_expert_alone(rows, transposed, dtype):
    x, expert = random(rows, 100, dtype=dtype), torch.arange(rows, device=DEVICE) * 7 % 5
    weight = random(6, 100, 70, dtype=dtype).transpose(1, 2) if transposed else random(6, 70, 100, dtype=dtype)
    found = ordered_expert_linear(x, weight, expert)
    for row in range(rows):
        assert_same_bits(found[row], ordered_linear(x[row : row + 1], weight[expert[row]])[0])


@pytest.mark.costly
@pytest.mark.parametrize(("n", "dtype"), TEXTS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_token_attends_with_the_same_bits_in_any_form(setting, form, n, dtype):
    states = ATTENTION.random_text(n + 5, dtype)
    expected = ATTENTION.alone(n, dtype, setting)
    assert_same_bits(ATTENTION.come_as(form, states, n, **SETTINGS[setting]), expected)


@pytest.mark.variant
@pytest.mark.parametrize("n", [460, *([4094, 5000] if CUDA else [])])  # four splits and more
@pytest.mark.parametrize("setting", SETTINGS)
def test_splits_that_one_program_folds_give_the_same_bits(setting, n, monkeypatch):
    states = ATTENTION.random_text(n + 5, HALF[0])
    expected = ATTENTION.alone(n, HALF[0], setting)
    monkeypatch.setattr(import_module("redrafter.kernels.ordered_attention"), "TARGET_PROGRAMS", 1)
    for form in ("tree", "last node"):
        assert_same_bits(ATTENTION.come_as(form, states, n, **SETTINGS[setting]), expected)


def test_splits_begin_where_tiles_do():
    assert NEAR % NEAR_SPLIT == NEAR_SPLIT % TILE == FAR_SPLIT % TILE == 0
