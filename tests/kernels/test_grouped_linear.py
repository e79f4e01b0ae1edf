"""Products of grouped weights: the operator, and its kernels beside the reference."""

import torch
from torch.nn.functional import linear

from redrafter.kernels.grouped_linear import grouped_linear
from redrafter.kernels.grouped_weight import quantize_groups


def test_the_product_is_that_of_the_dequantised_weight():
    weight = quantize_groups(torch.randn(24, 64), 4)
    x, bias = torch.randn(2, 3, 64), torch.randn(24)
    out = grouped_linear(x, weight.codes, weight.scale, weight.minimum, bias)
    torch.testing.assert_close(out, linear(x, weight.dequantize(), bias))
