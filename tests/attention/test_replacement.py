"""Attention in the place of a model's own: scores are capped where its own caps them, and nowhere else."""

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from helpers.models import VOCAB, assert_close_by_scale, tiny_model
from helpers.steps import read_prompts, verify
from redrafter.cache.paged import KVCachePool, PagedCache
from redrafter.model.target import Target
from redrafter.tree.token_tree import chain

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
