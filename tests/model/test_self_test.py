"""The self-test of a model that is being bound: what it computes, and what it does not compute again."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from redrafter.model import self_test


class Counting(self_test.InFloat32):
    """Records the shape of every tensor that is converted."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.shapes, convert = [], torch.Tensor.float
        monkeypatch.setattr(torch.Tensor, "float", lambda x: (self.shapes.append(tuple(x.shape)), convert(x))[1])


def test_in_float32_only_the_rows_of_a_table_that_are_read_are_converted(monkeypatch):
    table, ids = nn.Embedding(50, 4, dtype=torch.bfloat16), torch.tensor([[3, 7]])
    expected = functional.embedding(ids, table.weight.float())
    with torch.no_grad(), Counting(monkeypatch) as mode:
        assert torch.equal(table(ids), expected)
    assert mode.shapes == [(1, 2, 4)]


def test_in_float32_a_weight_is_converted_once_unless_the_copy_was_written_to(monkeypatch):
    layer, x = nn.Linear(4, 6, bias=False, dtype=torch.bfloat16), torch.ones(1, 4)
    expected = functional.linear(x, layer.weight.float())
    with torch.no_grad(), Counting(monkeypatch) as mode:
        assert torch.equal(layer(x), expected)
        assert torch.equal(layer(x), expected)
        assert mode.shapes == [(6, 4)]
        copy = layer.weight.to(torch.float32)  # code that is right without the mode, which gives it a copy of its own
        copy += 1
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("limit", [0, 4 * 24])
def test_in_float32_no_more_memory_is_held_than_the_limit(monkeypatch, limit):
    monkeypatch.setattr(self_test, "MAX_HELD_BYTES", limit)
    layers, x = [nn.Linear(4, 6, bias=False, dtype=torch.bfloat16) for _ in range(2)], torch.ones(1, 4)
    with torch.no_grad(), Counting(monkeypatch) as mode:
        for layer in layers * 2:
            layer(x)
    assert len(mode.shapes) == 4 - limit // 96
