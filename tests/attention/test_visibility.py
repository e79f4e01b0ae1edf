"""What a position sees, past every number of a config that limits it: the same tokens as `model.generate`."""

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from helpers.generation import ON_BOTH_CACHES, same_undrafted
from helpers.models import VOCAB, assert_close_by_scale, paged, tiny_drafter, tiny_model, uneven_batch, with_tree
from helpers.steps import read_prompts, verify
from redrafter import UnsupportedError
from redrafter.attention.mask import AttentionKind, LayerKinds
from redrafter.cache.paged import KVCachePool, PagedCache
from redrafter.model.target import Target
from redrafter.model.traits import learn_traits
from redrafter.model.varlen_forward import VarlenForward
from redrafter.tree.token_tree import chain

NEW = 24
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LONG = {"max_position_embeddings": 256}
WINDOWED = {
    # Attention functions that are not told of the window, which is longer than what a short trial reads.
    "qwen2_moe": _LONG
    | _EXPERTS
    | {"use_sliding_window": True, "sliding_window": 70, "max_window_layers": 1, "shared_expert_intermediate_size": 16},
    "phimoe": _LONG | {"sliding_window": 70, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mistral": _LONG | {"sliding_window": 70},
}
_LLAMA4 = {
    "num_hidden_layers": 4,
    "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
    "no_rope_layers": [1, 1, 1, 0],
    "attention_chunk_size": 32,
    "intermediate_size_mlp": 48,
    "num_local_experts": 2,
    "floor_scale": 40,
    "max_position_embeddings": 256,
}
_NEO = {"attention_types": [[["global", "local", "global"], 1]], "num_heads": 4}
BY_SLOT = {
    "window": ("gpt_neo", _NEO | {"window_size": 8, "max_position_embeddings": 256}),
    "long window": ("gpt_neo", _NEO | {"window_size": 70, "max_position_embeddings": 256}),
    "end of the context": ("gpt_neo", _NEO | {"window_size": 8, "max_position_embeddings": 90 + NEW}),
    "temperature tuning": ("llama4_text", _LLAMA4),
}
STRAY = ["llama", "granite", "gemma", "glm", "olmo", "nemotron"]


def check_texts(engine, ids, mask, **reference):
    """Compare greedy texts with `model.generate` and sampled ones with undrafted decoding."""
    arguments = {"max_new_tokens": NEW, "min_new_tokens": NEW}
    expected = engine.model.generate(ids, attention_mask=mask, do_sample=False, **arguments, **reference)
    assert torch.equal(engine.generate(ids, mask, do_sample=False, **arguments), expected)
    same_undrafted(engine, ids, mask, do_sample=True, seed=5, **arguments)


@ON_BOTH_CACHES
@pytest.mark.parametrize("architecture", WINDOWED)
def test_windows_longer_than_a_short_trial_are_kept(architecture, on):
    engine = with_tree(tiny_model(architecture, **WINDOWED[architecture]), tiny_drafter(), 3, 3)
    check_texts(on(engine), *uneven_batch(rows=4, longest=90))


@pytest.mark.parametrize("case", BY_SLOT)
def test_attention_that_reads_positions_off_the_cache_is_told_them(case):
    architecture, changes = BY_SLOT[case]
    model = tiny_model(architecture, **changes)
    before = [(name, id(buffer)) for name, buffer in model.named_buffers()]
    check_texts(with_tree(model, tiny_drafter(), 3, 3), *uneven_batch(rows=4, longest=90))
    assert [(name, id(buffer)) for name, buffer in model.named_buffers()] == before


def test_chunks_and_temperatures_are_kept_on_the_paged_cache():
    """Its linear layers are fused there, the query projection that is scaled among them."""
    engine = paged(with_tree(tiny_model("llama4_text", **_LLAMA4), tiny_drafter(), 3, 3))
    check_texts(engine, *uneven_batch(rows=4, longest=90))


@pytest.mark.parametrize("broken", ["chunks", "temperatures"])
def test_chunks_and_temperatures_that_are_lost_on_the_paged_cache_are_noticed(broken, monkeypatch):
    if broken == "chunks":
        monkeypatch.setattr(LayerKinds, "chunk_sizes", ())
    else:
        monkeypatch.setattr(VarlenForward, "_new_positions", lambda self: self._positions[None] * 0)
    assert "gives other logits" in Target(tiny_model("llama4_text", **_LLAMA4)).paged.reason


@ON_BOTH_CACHES
@pytest.mark.parametrize("architecture", STRAY)
def test_a_window_that_attention_ignores_is_ignored(architecture, on):
    """It is compared without a cache: transformers' own forgets what is past a window, though the model has none."""
    engine = with_tree(tiny_model(architecture, sliding_window=8), tiny_drafter(), 3, 3)
    check_texts(on(engine), *uneven_batch(rows=4, longest=40), use_cache=False)


@pytest.mark.parametrize("kept", [4, 40])
def test_a_mask_that_depends_on_the_text_is_refused(kept):
    """Doge keeps the `keep_window_size` keys of highest score."""
    with pytest.raises(UnsupportedError, match="changes its masks by what a text says"):
        Target(tiny_model("doge", keep_window_size=kept))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_model_may_return_float32_logits(dtype):
    model = tiny_model("llama").to(dtype)
    model.lm_head.register_forward_hook(lambda _, __, logits: logits.float())
    Target(model)


def test_layers_are_known_by_the_masks_that_they_are_given():
    model = tiny_model("gemma3_text", sliding_window=6)
    near, far = AttentionKind(window=6), AttentionKind()
    kinds = learn_traits(model, model.config, torch.arange(5) % VOCAB, "it").kinds
    assert kinds.by_layer == (near, far, near)
    assert kinds.windows == (6, 0, 6)
    assert kinds.by_name == {"full_attention": far, "sliding_attention": near}


def test_chunks_are_told_from_windows():
    model = tiny_model("llama4_text", **_LLAMA4)
    kinds = learn_traits(model, model.config, torch.arange(5), "it").kinds
    assert kinds.by_layer == (AttentionKind(chunk=32),) * 3 + (AttentionKind(),)


_SDPA = ALL_ATTENTION_FUNCTIONS["sdpa"]


def sdpa_without_caps(module, query, key, value, attention_mask, softcap=None, **kwargs):
    """Attend as `sdpa` of transformers before 5.21, which passes a cap over; later ones refuse it."""
    return _SDPA(module, query, key, value, attention_mask, **kwargs)


@pytest.mark.parametrize("on_pages", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_scores_are_capped_as_by_the_attention_that_a_model_was_loaded_with(attention, on_pages, monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", sdpa_without_caps)
    model = tiny_model("gemma2", attn_logit_softcapping=0.3)
    model.config._attn_implementation = attention
    target = Target(model)
    text, length = torch.arange(11)[None] * 7 % VOCAB, torch.tensor([9])
    cache = target.new_cache(1)
    cache.reserve(16)
    if on_pages:
        cache = PagedCache(KVCachePool(target.paged_shapes, 2), torch.tensor([[1]]).int())
    with torch.inference_mode():
        read, _ = read_prompts(target, text[:, :9], length, cache)
        verified, _ = verify(target, chain(text[:, 9:]), length, cache)
        expected = model(text).logits[0, 8:]
    assert_close_by_scale(torch.cat([read, verified[0]]), expected, 2e-5)
