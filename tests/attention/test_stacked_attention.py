"""Attention of a CPU's dense trees, whose queries share key heads."""

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from helpers.models import tiny_model
from redrafter.attention import tree_attention
from redrafter.attention.mask import additive_mask
from redrafter.attention.tree_attention import stacked_attention
from redrafter.model.forward_batch import ForwardBatch
from redrafter.model.target import Target
from redrafter.tree.token_tree import chain


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("count", [1, 4])
def test_stacked_queries_attend_as_repeated_keys_do(group, count):
    torch.manual_seed(0)
    query, key = torch.randn(2, 2 * group, count, 8), torch.randn(2, 11, 2, 8).transpose(1, 2)
    value, module = torch.randn(2, 2, 11, 4), SimpleNamespace(num_key_value_groups=group, is_causal=True)
    seen = torch.rand(2, count, 11) < 0.5
    seen[..., 0] = True
    for mask in (additive_mask(seen, torch.float32), None):
        out, _ = stacked_attention(module, query, key, value, mask, scaling=0.3)
        expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
        torch.testing.assert_close(out, expected)


def test_a_dense_tree_attends_without_copies_of_keys(monkeypatch):
    target = Target(tiny_model("llama"))
    calls, attend = [], tree_attention.scaled_dot_product_attention

    def record(query, key, value, **how):
        calls.append((query.shape[1], key.shape[1]))
        return attend(query, key, value, **how)

    monkeypatch.setattr(tree_attention, "scaled_dot_product_attention", record)
    cache = target.new_cache(1)
    cache.reserve(16)
    with torch.inference_mode():
        target.verify(ForwardBatch(chain(torch.arange(5, 9)[None]), torch.tensor([0]), cache))
    heads = target.config.num_key_value_heads
    assert heads < target.config.num_attention_heads
    assert calls == [(heads, heads)] * target.config.num_hidden_layers
    assert target.config._attn_implementation == "sdpa"
