"""Layers of which each rank has a part, on ranks whose parts are added up by the test."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from redrafter.parallel.local_shards import GatheredLinear, SummedLinear
from redrafter.parallel.ranks import ALONE, Ranks


@dataclass(frozen=True, eq=False)
class Apart(Ranks):
    """A rank that is told nothing by the others: it returns its own part."""

    def sum(self, x: Tensor) -> Tensor:
        """Return this rank's part of the sum."""
        return x

    def join_last(self, x: Tensor) -> Tensor:
        """Return this rank's part of what is joined."""
        return x


@pytest.fixture
def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(10, 7).double()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("splits", [False, True])
def test_parts_of_the_input_add_up_to_the_layer(layer, size, splits):
    x = torch.randn(3, 10, dtype=torch.double)
    outputs = []
    for rank, (weight, own) in enumerate(zip(layer.weight.chunk(size, 1), x.chunk(size, 1), strict=True)):
        part = SummedLinear(layer, nn.Parameter(weight), None, Apart(rank, size), splits)
        outputs.append(part(x if splits else own))
    torch.testing.assert_close(sum(outputs) + layer.bias, layer(x))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_of_the_output_are_the_layer_side_by_side(layer, size):
    x = torch.randn(3, 10, dtype=torch.double)
    parts = [
        GatheredLinear(layer, nn.Parameter(weight), nn.Parameter(bias), Apart(rank, size))
        for rank, (weight, bias) in enumerate(zip(layer.weight.chunk(size), layer.bias.chunk(size), strict=True))
    ]
    torch.testing.assert_close(torch.cat([part(x) for part in parts], dim=-1)[..., :7], layer(x))


def test_one_process_agrees_with_itself():
    assert (ALONE.from_first("a"), ALONE.minimum(3)) == ("a", 3)
    ALONE.check_equal("a", "it")
