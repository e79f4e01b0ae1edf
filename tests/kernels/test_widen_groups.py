"""Grouped weights are dequantised on a GPU to the numbers that `GroupedWeight.dequantize` computes."""

import pytest
import torch

pytest.importorskip("triton")

from helpers.attention import DEVICE
from redrafter.kernels.grouped_weight import GroupedWeight, quantize_groups
from redrafter.kernels.widen_groups import widen_grouped


def quantized(bits, features, inner, group, scales):
    weight = quantize_groups(torch.randn(features, inner, generator=torch.Generator().manual_seed(1)), bits, group)
    minimum = None if weight.minimum is None else weight.minimum.to(DEVICE, scales)
    return GroupedWeight(weight.codes.to(DEVICE), weight.scale.to(DEVICE, scales), minimum)


@pytest.mark.parametrize(
    ("bits", "inner", "group"), [(4, 160, 32), (4, 192, 96), (4, 288, 288), (8, 96, 16), (8, 208, 208)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, *([torch.bfloat16] if DEVICE == "cuda" else [])])
@pytest.mark.parametrize("scales", [torch.float16, torch.float32])
def test_a_widened_weight_is_the_dequantised_one(bits, inner, group, dtype, scales):
    weight = quantized(bits, 33, inner, group, scales)
    assert torch.equal(widen_grouped(weight, dtype), weight.dequantize(dtype))


def test_parts_of_a_weight_that_are_apart_are_widened():
    weight = quantized(4, 64, 256, 32, torch.float16)
    half = GroupedWeight(weight.codes[:, :64], weight.scale[:, :4], weight.minimum[:, :4])
    assert torch.equal(widen_grouped(half, torch.float16), half.dequantize(torch.float16))
