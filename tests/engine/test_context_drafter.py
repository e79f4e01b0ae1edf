"""A drafter that attends to committed tokens: what it finds in the cache is what the whole text gives, always."""

from collections.abc import Iterator

import pytest
import torch

from helpers.context_drafter import checked_windows, context_drafter
from helpers.models import VOCAB, paged, tiny_model, uneven_batch, with_tree
from helpers.steps import read_prompts
from redrafter import MismatchError, ReDrafter
from redrafter.drafting.context_attention import ContextWindow
from redrafter.drafting.drafter import RecurrentProposer
from redrafter.model.target import Target


@pytest.fixture
def checks() -> Iterator[None]:
    with checked_windows():
        yield


def engine_of(architecture: str = "llama", **changes: object) -> ReDrafter:
    engine = with_tree(tiny_model(architecture), context_drafter(**changes), 4, 3)
    engine.pauses = False
    return engine


@pytest.mark.parametrize("on", [lambda engine: engine, paged], ids=["dense", "paged"])
@pytest.mark.parametrize("kinds", [{"do_sample": False}, {"do_sample": True, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt_oss"])
def test_generate_writes_what_plain_decoding_writes(architecture, kinds, on, checks):
    engine = on(engine_of(architecture))
    ids, mask = uneven_batch()
    texts = [engine.generate(ids, mask, max_new_tokens=30, speculate=speculate, **kinds) for speculate in (True, False)]
    assert torch.equal(*texts)
    if not kinds["do_sample"]:
        expected = engine.model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False)
        assert torch.equal(texts[0], expected)


def test_what_is_read_changes_the_drafts():
    engine, ids = engine_of(), torch.randint(3, VOCAB, (1, 30), generator=torch.Generator().manual_seed(2))
    trees = []
    propose = RecurrentProposer.propose

    def kept(self, *arguments):
        trees.append(propose(self, *arguments))
        return trees[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecurrentProposer, "propose", kept)
        engine.generate(ids, max_new_tokens=2, do_sample=False)
        with torch.no_grad():
            engine.drafter.context.out.weight.zero_()
        engine.generate(ids, max_new_tokens=2, do_sample=False)
    assert not torch.equal(trees[0].tokens, trees[-1].tokens)


@pytest.mark.parametrize("on", [lambda engine: engine, paged], ids=["dense", "paged"])
def test_a_window_longer_than_any_text_takes_no_more_memory_than_the_texts(on, monkeypatch):
    engine, ids, pairs = on(engine_of(context_window=100_000)), torch.arange(3, 33)[None], []
    read = ContextWindow.read

    def read_counted(*arguments: object) -> ContextWindow:
        window = read(*arguments)
        pairs.append(window.bias.shape[-1] - 1)
        return window

    monkeypatch.setattr(ContextWindow, "read", read_counted)
    text = engine.generate(ids, max_new_tokens=10, do_sample=False)
    assert torch.equal(text, engine.generate(ids, max_new_tokens=10, do_sample=False, speculate=False))
    assert pairs
    assert 40 <= min(pairs) <= max(pairs) < 1_000


def test_a_second_drafter_on_one_target_is_refused():
    engine = engine_of()
    ReDrafter(engine.target, engine.drafter)
    with pytest.raises(MismatchError, match="load the target anew"):
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
