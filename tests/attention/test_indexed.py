"""Attention to the slots that an indexer chooses: its keys are stored, masked and committed like all others."""

import pytest

from helpers.generation import same_as_model, same_undrafted
from helpers.models import tiny_drafter, tiny_model, uneven_batch, with_spread_weights, with_tree
from redrafter import UnsupportedError
from redrafter.model.target import Target

NEW = 24
# Scores of few heads are often all 0, and which of equal scores are chosen is left to chance.
INDEXED = {
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "index_n_heads": 24,
    "index_head_dim": 8,
    "num_hidden_layers": 4,
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
}
SHARED = {"indexer_types": ["full", "shared", "full", "shared"]}


def indexed(topk, model_type="deepseek_v32", **changes):
    return with_spread_weights(tiny_model(model_type, index_topk=topk, **INDEXED, **changes))


@pytest.mark.parametrize("topk", [4, 40])
@pytest.mark.parametrize(("model_type", "changes"), [("deepseek_v32", {}), ("glm_moe_dsa", SHARED)])
def test_models_with_an_indexer_write_what_generate_writes(model_type, changes, topk):
    ids, mask = uneven_batch(rows=4, longest=60)
    engine = with_tree(indexed(topk, model_type, **changes), tiny_drafter(), 3, 3)
    same_as_model(engine, ids, mask, max_new_tokens=NEW, min_new_tokens=NEW)
    same_undrafted(engine, ids, mask, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=True, seed=5)


def test_a_layer_that_shares_anothers_choice_stores_no_keys_of_an_indexer():
    shapes = Target(indexed(4, "glm_moe_dsa", **SHARED)).shapes
    assert [shape.extra_dim for shape in shapes] == [8, 0, 8, 0]


def test_the_paged_cache_is_refused_for_a_model_with_an_indexer():
    assert "an indexer chooses what its layers attend to" in Target(indexed(4)).paged.reason


@pytest.mark.parametrize("topk", [4, 40])  # the shorter one matters in a near trial, the longer one in a far one
def test_keys_of_an_indexer_in_wrong_slots_are_noticed_when_a_model_is_bound(topk, monkeypatch):
    layer = type(Target(indexed(topk)).new_cache(1).layers[0])
    store = layer.update_indexer
    monkeypatch.setattr(layer, "update_indexer", lambda self, states: store(self, states).flip(1))
    with pytest.raises(UnsupportedError, match="gives other logits for a token tree"):
        Target(indexed(topk))
