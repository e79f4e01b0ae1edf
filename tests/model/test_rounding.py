"""A base that rounds inside its layers is as exact as one in bfloat16, and loading it says so."""

import warnings

import pytest
import torch
from torch import nn

from helpers.models import tiny_model
from redrafter.measure.record import FLOAT32_TOLERANCE, tolerance
from redrafter.model.target import Target


class Rounded(nn.Linear):
    """Multiplies in bfloat16, as NF4's AVX512 kernels do, or rounds its inputs to 8 bits, as dynamic int8 does."""

    bits = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bits:
            scale = x.abs().amax(-1, keepdim=True) / 127
            return super().forward((x / scale).round() * scale)
        return (x.bfloat16() @ self.weight.T.bfloat16()).to(x.dtype)


@pytest.mark.parametrize("bits", [False, True])
def test_a_base_that_rounds_inside_warns_once_and_widens_near_ties(bits, monkeypatch):
    monkeypatch.setattr(Rounded, "bits", bits)
    model = tiny_model("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    for module in model.model.layers.modules():
        if type(module) is nn.Linear:
            module.__class__ = Rounded
    with pytest.warns(UserWarning, match="as exact as in bfloat16") as caught:
        target = Target(model)
    assert len(caught) == 1
    logits = torch.randn(100)
    assert tolerance(logits, target.dtype, target.rounding) > 2 * FLOAT32_TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_ordinary_base_warns_of_nothing(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target = Target(tiny_model("llama").to(dtype))
    assert target.rounding == 0
    assert tolerance(torch.randn(100), torch.float32, target.rounding) == FLOAT32_TOLERANCE
