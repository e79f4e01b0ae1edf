"""Binding a model: what cannot be verified is refused by name, and what is served equals plain forwards."""

from copy import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import T5Config, T5ForConditionalGeneration

from helpers.models import ARCHITECTURES, CHUNKED, VOCAB, check_texts, paged, tiny_drafter, tiny_model, with_tree
from helpers.steps import grown_and_whole
from redrafter import CheckpointError, UnsupportedError
from redrafter.cache.paged import KVCachePool, PagedCache
from redrafter.model.target import Target

GRANITE = {"mamba_n_heads": 4, "mamba_d_head": 16, "shared_intermediate_size": 48, "num_local_experts": 0}


@pytest.mark.parametrize("position_embedding_type", ["rope", None])
def test_a_class_for_hybrids_is_served_where_every_layer_is_attention(position_embedding_type):
    layers = {"layer_types": ["attention"] * 3, "position_embedding_type": position_embedding_type}
    model = tiny_model("granitemoehybrid", **GRANITE | layers)
    if model(torch.tensor([[5]]), use_cache=True).past_key_values is None:
        pytest.skip("this transformers makes no cache for such a model")
    check_texts(*(on(with_tree(model, tiny_drafter(), 5, 3)) for on in (lambda engine: engine, paged)))


@pytest.mark.parametrize("rows", [4, 1])
def test_a_model_that_reads_keys_by_view_is_given_contiguous_ones(rows):
    model = tiny_model("gpt_neox_japanese", intermediate_multiple_size=2, attention_dropout=0.0, hidden_dropout=0.0)
    engine = with_tree(model, tiny_drafter(), 5, 3)
    assert "its attention cannot be replaced: no layer attends through" in engine.target.paged.reason
    check_texts(engine, rows=rows)


def test_models_in_which_tokens_see_later_ones_are_refused():
    config = T5Config(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        Target(T5ForConditionalGeneration(config))
    with pytest.raises(UnsupportedError, match="reads its prompt in both directions"):
        Target(tiny_model("gemma", use_bidirectional_attention=True, head_dim=8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_self_test_catches_a_model_that_looks_at_slots_instead_of_positions(dtype):
    class Shifted(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x, position_ids):
            return self.inner(x, torch.arange(x.shape[1])[None].expand_as(position_ids))

    model = tiny_model("llama").to(dtype)
    model.model.rotary_emb = Shifted(model.model.rotary_emb)
    with pytest.raises(UnsupportedError, match="gives other logits"):
        Target(model)


def test_weights_that_are_no_numbers_are_not_blamed_on_the_architecture():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    with pytest.raises(CheckpointError, match="logits that are not finite; its weights are damaged"):
        Target(model)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "llama4_text"])
def test_a_tree_that_is_grown_level_by_level_equals_the_whole(architecture, paged):
    target = Target(tiny_model(architecture, **(CHUNKED if architecture == "llama4_text" else {})))

    def new_cache():
        if paged:
            return PagedCache(KVCachePool(target.paged_shapes, 7), torch.tensor([[3, 1], [4, 2], [6, 5]]).int())
        cache = target.new_cache(3)
        cache.reserve(32)
        return cache

    for grown, expected in zip(*grown_and_whole(target, new_cache), strict=True):
        assert torch.allclose(grown, expected, atol=5e-5)


def test_a_model_whose_layers_are_spread_is_on_no_paged_cache(llama):
    """Its weights are gathered by hooks, outside of which paged decoding calls its layers."""
    spread = copy(llama)
    spread.__class__ = type("FSDPLlama", (FSDPModule, type(llama)), {})
    assert Target(llama).paged.ok
    assert Target(spread).paged.reason == "its layers are spread over several processes"
