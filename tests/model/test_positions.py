"""Biases that fall with distance: what a tree is given is what its positions say, in models with ALiBi."""

import pytest
import torch

from helpers.models import (
    check_texts,
    in_threads,
    tiny_drafter,
    tiny_model,
    uneven_batch,
    with_spread_weights,
    with_tree,
)
from redrafter import PromptLookup, UnsupportedError
from redrafter.attention.mask import TreeSlots
from redrafter.model.patch import ModelPatch
from redrafter.model.positions import answer_by_position, find_slot_readers
from redrafter.model.target import Target

SIX_HEADS = {"num_attention_heads": 6, "hidden_size": 48}  # their slopes follow another rule than those of four
MODELS = {
    "bloom": lambda: with_spread_weights(tiny_model("bloom")),
    "bloom, six heads": lambda: with_spread_weights(tiny_model("bloom", **SIX_HEADS)),
    "falcon": lambda: with_spread_weights(tiny_model("falcon", alibi=True)),
    "falcon, eager": lambda: with_spread_weights(tiny_model("falcon", alibi=True, attn_implementation="eager")),
    "mpt": lambda: with_spread_weights(tiny_model("mpt", max_seq_len=128)),
    "mpt, six heads": lambda: with_spread_weights(tiny_model("mpt", max_seq_len=128, **SIX_HEADS)),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_with_alibi_write_what_generate_writes(name):
    model = MODELS[name]()
    engine = with_tree(model, tiny_drafter(hidden_size=model.config.hidden_size), 3, 3)
    check_texts(engine, longest=60)
    hooked = [module for module in model.modules() if module._forward_pre_hooks]
    assert not hooked


@pytest.mark.parametrize("name", MODELS)
def test_a_bias_that_follows_slots_is_refused_when_a_model_is_bound(name, monkeypatch):
    model = MODELS[name]()
    monkeypatch.setattr(TreeSlots, "positions", property(lambda slots: torch.arange(slots.count).expand(2, -1)))
    with pytest.raises(UnsupportedError, match="gives other logits for a token tree"):
        Target(model)


@pytest.mark.parametrize("name", ["bloom", "falcon", "mpt"])
def test_a_forward_of_another_thread_keeps_its_own_bias(name):
    model = MODELS[name]()
    text = torch.arange(5, 12)[None]
    tree = TreeSlots(torch.tensor([3]), torch.tensor([[0, 1, 1]]), torch.eye(3).bool()[None], 6)
    with torch.no_grad():
        expected = model(text).logits
        with ModelPatch() as patch:
            answer_by_position(patch, find_slot_readers(model), lambda: torch.tensor([[3, 4, 4]]), tree)
            others = in_threads(lambda _: model(text).logits, 1)
    assert torch.equal(others[0], expected)


def test_mpt_ends_where_its_table_of_biases_does():
    target = Target(tiny_model("mpt", max_seq_len=40))
    assert target.context == 40
    ids, mask = uneven_batch(rows=1, longest=30)
    engine = PromptLookup.from_pretrained(target.model)
    written = engine.generate(ids, mask, max_length=40, min_length=40, do_sample=False)
    assert torch.equal(written, target.model.generate(ids, attention_mask=mask, max_length=40, min_length=40))


def test_alibi_in_code_that_is_not_known_is_refused():
    model = tiny_model("llama")
    model.config.alibi = True
    with pytest.raises(UnsupportedError, match=r"has ALiBi attention in custom code.*without trust_remote_code"):
        Target(model)
