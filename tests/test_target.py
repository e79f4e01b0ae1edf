import pytest
import torch
from torch import nn

from conftest import VOCAB, tiny_model, uneven_batch
from redrafter import UnsupportedError
from redrafter.target import PREFILL_CHUNK, Target


@pytest.mark.parametrize(
    ("architecture", "changes", "named"),
    [
        ("mamba", {}, "MambaForCausalLM has linear_attention layers"),
        ("jamba", {}, "JambaForCausalLM"),
        ("falcon_h1", {}, "FalconH1ForCausalLM has hybrid layers"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "conv"),
        ("rwkv", {}, "RwkvForCausalLM has recurrent layers"),
        ("roberta", {"is_decoder": True}, "RobertaForCausalLM gives other logits"),
        ("bloom", {}, "BloomForCausalLM"),
    ],
)
def test_what_cannot_be_verified_as_a_tree_is_refused_by_name(architecture, changes, named):
    with pytest.raises(UnsupportedError, match=named):
        Target(tiny_model(architecture, **changes))


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


def test_the_self_test_catches_a_model_that_looks_at_slots_instead_of_positions():
    class Shifted(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x, position_ids):
            return self.inner(x, torch.arange(x.shape[1])[None].expand_as(position_ids))

    model = tiny_model("llama")
    model.model.rotary_emb = Shifted(model.model.rotary_emb)
    with pytest.raises(UnsupportedError, match="gives other logits"):
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
        target.prefill(torch.tensor([[5, 6, 7]]), torch.tensor([3]), cache)
    assert not head._forward_pre_hooks and not head._forward_hooks


def test_a_prompt_of_many_chunks_is_read_as_one(monkeypatch):
    assert PREFILL_CHUNK >= 256
    model = tiny_model("mistral")
    target = Target(model)
    ids, mask = uneven_batch(rows=3)
    length = mask.sum(1)
    prompts = torch.zeros_like(ids)
    for row in range(3):
        prompts[row, : length[row]] = ids[row, mask[row].bool()]
    results = []
    for chunk in (512, 4, 1):
        monkeypatch.setattr("redrafter.target.PREFILL_CHUNK", chunk)
        cache = target.new_cache(3)
        cache.reserve(16)
        with torch.inference_mode():
            results.append(target.prefill(prompts, length, cache))
    for logits, hidden in results[1:]:
        torch.testing.assert_close(logits, results[0][0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(hidden, results[0][1], atol=1e-4, rtol=1e-4)


def test_rope_that_changes_with_length_is_served_up_to_its_original_context():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32}
    target = Target(tiny_model("llama", rope_parameters=rope, max_position_embeddings=64))
    assert target.context == 32
