"""A drafter that attends to committed tokens: what it finds in the cache is what the whole text gives, always."""

import pytest
import torch

from helpers.context_drafter import context_drafter
from helpers.generation import ON_BOTH_CACHES, noted, same_undrafted
from helpers.models import VOCAB, tiny_model, with_tree
from helpers.steps import read_prompts
from redrafter import MismatchError, ReDrafter
from redrafter.drafting.context_attention import ContextWindow
from redrafter.drafting.drafter import RecurrentProposer
from redrafter.model.target import Target


def engine_of(architecture: str = "llama", **changes: object) -> ReDrafter:
    return with_tree(tiny_model(architecture), context_drafter(**changes), 4, 3)


def test_what_is_read_changes_the_drafts(monkeypatch):
    engine, ids = engine_of(), torch.randint(3, VOCAB, (1, 30), generator=torch.Generator().manual_seed(2))
    trees = noted(monkeypatch, RecurrentProposer, "propose")
    engine.generate(ids, max_new_tokens=2, do_sample=False)
    with torch.no_grad():
        engine.drafter.context.out.weight.zero_()
    engine.generate(ids, max_new_tokens=2, do_sample=False)
    assert not torch.equal(trees[0].tokens, trees[-1].tokens)


@ON_BOTH_CACHES
def test_a_window_longer_than_any_text_takes_no_more_memory_than_the_texts(on, monkeypatch):
    engine = on(engine_of(context_window=100_000))
    pairs = noted(monkeypatch, ContextWindow, "read_last", lambda window, *_: window.bias.shape[-1] - 1)
    same_undrafted(engine, torch.arange(3, 33)[None], max_new_tokens=10, do_sample=False)
    assert 40 <= min(pairs) <= max(pairs) < 1_000


def test_a_second_drafter_on_one_target_is_refused():
    engine = engine_of()
    ReDrafter(engine.target, engine.drafter)
    with pytest.raises(MismatchError, match="load the target again"):
        ReDrafter(engine.target, context_drafter())


@torch.inference_mode()
def test_a_cache_that_is_older_than_the_drafter_is_left_alone():
    target = Target(tiny_model("llama"))
    cache, ids = target.new_cache(1), torch.randint(3, VOCAB, (1, 20), generator=torch.Generator().manual_seed(2))
    cache.reserve(20)
    ReDrafter(target, context_drafter())
    read_prompts(target, ids, torch.tensor([20]), cache)
    fresh = target.new_cache(1)
    fresh.reserve(20)
    read_prompts(target, ids, torch.tensor([20]), fresh)
    assert len(fresh.layers) == len(cache.layers) + 1
    for mine, other in zip(cache.layers, fresh.layers, strict=False):
        assert torch.equal(mine.keys, other.keys)
        assert torch.equal(mine.values, other.values)
