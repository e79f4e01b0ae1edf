"""Binding a model: what cannot be verified is refused by name, and what is served equals plain forwards."""

import pytest
import torch
from torch import nn

from helpers.models import ARCHITECTURES, CHUNKED, VOCAB, paged, tiny_drafter, tiny_model, uneven_batch, with_tree
from helpers.steps import read_prompts, verify
from redrafter import CheckpointError, UnsupportedError
from redrafter.cache.paged import KVCachePool, PagedCache
from redrafter.model.target import Target
from redrafter.tree.token_tree import tree_of


def test_what_cannot_be_verified_as_a_tree_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="RwkvForCausalLM has recurrent layers"):
        Target(tiny_model("rwkv"))


GRANITE = {"mamba_n_heads": 4, "mamba_d_head": 16, "shared_intermediate_size": 48, "num_local_experts": 0}


@pytest.mark.parametrize("position_embedding_type", ["rope", None])
def test_a_class_for_hybrids_is_served_where_every_layer_is_attention(position_embedding_type):
    layers = {"layer_types": ["attention"] * 3, "position_embedding_type": position_embedding_type}
    model = tiny_model("granitemoehybrid", **GRANITE | layers)
    if model(torch.tensor([[5]]), use_cache=True).past_key_values is None:
        pytest.skip("this transformers makes no cache for such a model")
    ids, mask = uneven_batch()
    arguments = {"max_new_tokens": 20, "do_sample": False}
    expected = model.generate(ids, attention_mask=mask, **arguments)
    sampling = {"max_new_tokens": 20, "do_sample": True, "seed": 3}
    plain = with_tree(model, tiny_drafter(), 5, 3).generate(ids, mask, speculate=False, **sampling)
    for engine in (with_tree(model, tiny_drafter(), 5, 3), paged(with_tree(model, tiny_drafter(), 5, 3))):
        assert torch.equal(engine.generate(ids, mask, **arguments), expected)
        assert torch.equal(engine.generate(ids, mask, **sampling), plain)


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("rows", [4, 1])
def test_a_model_that_reads_keys_by_view_is_given_contiguous_ones(rows, speculate):
    model = tiny_model("gpt_neox_japanese", intermediate_multiple_size=2, attention_dropout=0.0, hidden_dropout=0.0)
    engine = with_tree(model, tiny_drafter(), 5, 3)
    assert "its attention cannot be replaced: no layer attends through" in engine.target.paged.reason
    ids, mask = uneven_batch(rows)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    assert torch.equal(engine.generate(ids, mask, max_new_tokens=20, do_sample=False, speculate=speculate), expected)


def test_an_encoder_decoder_is_refused():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        Target(T5ForConditionalGeneration(config))


def test_an_attention_that_takes_no_tree_mask_is_refused():
    model = tiny_model("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedError, match="attn_implementation='sdpa'"):
        Target(model)


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


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_both_stock_attentions_are_right(attention):
    model = tiny_model("mistral")
    model.set_attn_implementation(attention)
    Target(model)


def test_binding_leaves_nothing_on_the_model():
    model = tiny_model("llama")
    head = model.get_output_embeddings()
    target = Target(model)
    cache = target.new_cache(1)
    cache.reserve(4)
    with torch.inference_mode():
        read_prompts(target, torch.tensor([[5, 6, 7]]), torch.tensor([3]), cache)
    assert not head._forward_pre_hooks
    assert not head._forward_hooks


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "llama4_text"])
def test_a_tree_that_is_grown_level_by_level_equals_the_whole(architecture, paged):
    target = Target(tiny_model(architecture, **(CHUNKED if architecture == "llama4_text" else {})))
    prompts = (torch.arange(33).view(3, 11) * 7 + 11) % VOCAB
    length = torch.tensor([11, 4, 9])
    parents = torch.tensor(
        [[0, 0, 0, 0, 1, 1, 3, 4, 6, 6], [0, 0, 0, 0, 2, 1, 2, 6, 4, 4], [0, 0, 0, 0, 3, 3, 3, 5, 4, 4]]
    )
    depth = torch.tensor([0, 1, 1, 1, 2, 2, 2, 3, 3, 3]).expand(3, 10)
    tokens = (torch.arange(30).view(3, 10) * 5 + 3) % VOCAB
    whole, results = tree_of(tokens, parents, depth, 3), []
    with torch.inference_mode():
        for levels in ([10], [1, 4, 7, 10]):
            if paged:
                cache = PagedCache(KVCachePool(target.paged_shapes, 7), torch.tensor([[3, 1], [4, 2], [6, 5]]).int())
            else:
                cache = target.new_cache(3)
                cache.reserve(32)
            read_prompts(target, prompts, length, cache)
            pieces = []
            for start, end in zip([0, *levels], levels, strict=False):
                tree = tree_of(tokens[:, :end], parents[:, :end], depth[:, :end], int(depth[0, end - 1]))
                tree = whole if len(levels) == 1 else tree.last_level(end - start)
                pieces.append(verify(target, tree, length, cache))
                one = torch.tensor([end - start - 1, 0, (end - start) // 2])  # the head at one of the new nodes
                alone = verify(target, tree, length, cache, logits_index=one)
                for part, all_of in zip(alone, pieces[-1], strict=True):
                    assert torch.allclose(part[:, 0], all_of[torch.arange(3), one], atol=2e-5)
            results.append([torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True)])
    assert torch.equal(tree.ancestors, whole.ancestors[:, -3:])
    for grown, expected in zip(*results[::-1], strict=True):
        assert torch.allclose(grown, expected, atol=5e-5)
