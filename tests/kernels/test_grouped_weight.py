"""Weights in groups: packing, dequantisation, rounding to the nearest code."""

import pytest
import torch
from einops import rearrange

from redrafter.kernels.grouped_weight import GroupedWeight, narrowest, pack_codes, quantize_groups, unpack_codes


def test_codes_are_packed_as_gguf_packs_them_and_unpacked_again():
    codes = torch.randint(0, 16, (3, 96), dtype=torch.uint8)
    packed = pack_codes(codes)
    assert packed.shape == (3, 48)
    assert packed[1, 16 + 5] == codes[1, 32 + 5] + 16 * codes[1, 32 + 21]
    assert torch.equal(unpack_codes(packed), codes)


def test_a_weight_is_its_code_times_the_scale_of_its_group_plus_the_minimum():
    codes, scale, minimum = torch.randint(0, 16, (4, 128)), torch.rand(4, 2), torch.randn(4, 2)
    weight = GroupedWeight(pack_codes(codes), scale, minimum)
    assert (weight.bits, weight.shape, weight.group) == (4, (4, 128), 64)
    expected = rearrange(codes.float(), "f (g n) -> f g n", g=2) * scale[:, :, None] + minimum[:, :, None]
    assert torch.equal(weight.dequantize(), expected.flatten(1))
    centred = GroupedWeight(pack_codes(codes), scale).dequantize()  # codes of 4 bits without minima mean -8 to 7
    assert torch.equal(centred[:, :64], (codes[:, :64] - 8) * scale[:, :1])
    eight = GroupedWeight(codes.to(torch.int8), scale)
    assert (eight.bits, eight.shape, eight.group) == (8, (4, 128), 64)
    assert torch.equal(eight.dequantize(torch.bfloat16)[:, 64:], (codes[:, 64:] * scale[:, 1:]).bfloat16())


@pytest.mark.parametrize(("bits", "codes"), [(4, 15), (8, 254)])
def test_rounding_errs_by_half_a_step(bits, codes):
    weight = torch.randn(8, 128)
    weight[0] = 0.25  # a group without a span
    grouped = quantize_groups(weight, bits, 64)
    span = rearrange(weight, "f (g n) -> f g n", n=64)
    span = span.amax(2) - span.amin(2) if bits == 4 else 2 * span.abs().amax(2)
    error = rearrange((grouped.dequantize() - weight).abs(), "f (g n) -> f g n", n=64).amax(2)
    assert bool((error <= 0.51 * span / codes + 2e-3 * weight.abs().max()).all())
    assert grouped.scale.dtype == torch.float16


def test_numbers_out_of_range_of_float16_keep_a_wide_scale():
    grouped = quantize_groups(torch.full((1, 32), 1e6).index_fill(1, torch.tensor([3]), -1e6), 4)
    assert grouped.scale.dtype == torch.float32
    assert torch.allclose(grouped.dequantize()[0, 3:5], torch.tensor([-1e6, 1e6]))


@pytest.mark.parametrize("bits", [4, 8])
def test_tiny_numbers_err_as_little_as_others(bits):
    weight = torch.randn(8, 64)
    tiny, plain = (quantize_groups(weight * size, bits).dequantize() / size - weight for size in (2**-20, 1))
    assert float(tiny.norm()) == pytest.approx(float(plain.norm()), rel=0.05)
    assert quantize_groups(torch.zeros(2, 32), bits).scale.dtype == torch.float16


def test_the_narrowest_dtype_changes_no_number():
    assert narrowest(torch.tensor([0.5, 3.0])).dtype == torch.float16
    assert narrowest(torch.tensor([0.1, 3.0])).dtype == torch.float32
