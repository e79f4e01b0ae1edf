"""Layers that store no keys and values of their own: they attend to an earlier layer's, or to images alone."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from helpers.models import (
    check_texts,
    paged,
    row_texts,
    scripted_engine,
    tiny_model,
    uneven_batch,
)
from redrafter import Engine
from redrafter.cache.dense import DenseCache
from redrafter.cache.kv_cache import LayerShape
from redrafter.cache.paged import KVCachePool
from redrafter.model.target import Target

SHAPE = LayerShape(2, 8, 8, torch.float32, torch.device("cpu"))

COMMON = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 6,
    "head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
}
FAMILIES = {
    "gemma3n_text": {"activation_sparsity_pattern": [0.0] * 6, "laurel_rank": 4, "altup_num_inputs": 2},
    "gemma4_text": {"global_head_dim": 16},
}


def sharing_model(family: str, shared: int) -> PreTrainedModel:
    """Return a random model whose last `shared` layers attend to what earlier ones store."""
    return tiny_model(family, **COMMON, **FAMILIES[family], num_kv_shared_layers=shared)


def engines(make: Callable[[], Engine]) -> list[Engine]:
    """Return an engine on each cache that serves the model.

    In older versions of transformers, Gemma 3n shares nothing where it has no cache of its own, and so is refused on
    the paged one.
    """
    made = [make()]
    return [*made, paged(make())] if made[0].target.paged.ok else made


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shared", [2, 3])
def test_texts_are_those_of_plain_decoding(family, shared):
    model = sharing_model(family, shared)
    ids, mask = uneven_batch()
    script = row_texts(model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False), mask)
    check_texts(*engines(lambda: scripted_engine(model, script, 3, 4)))


@pytest.mark.skipif("gemma4_text" not in FAMILIES, reason="this transformers has no Gemma 4")
def test_on_the_paged_cache_a_layer_attends_to_the_pool_of_the_one_it_shares_with():
    target = Target(sharing_model("gemma4_text", 3))
    assert target.paged.ok
    assert [shape.source for shape in target.paged_shapes] == [None, None, None, 1, 2, 1]
    store = KVCachePool(target.paged_shapes, 4)
    assert store.layer_pools[3] is not None
    for layer, source in ((3, 1), (4, 2), (5, 1)):
        assert store.layer_pools[layer] == store.layer_pools[source]
    assert KVCachePool.block_bytes(target.paged_shapes) == KVCachePool.block_bytes(target.paged_shapes[:3])
    assert sum(len(pool) for pool in store.pools) == 2 * 3


def test_a_layer_that_stores_nothing_takes_no_memory_and_no_keys():
    cache = DenseCache([SHAPE, SHAPE.storing_nothing()], rows=2)
    cache.reserve(16)
    assert sum(len(pool) for pool in cache.pools) == 2
    assert cache.layers[1].keys is None
    with pytest.raises(RuntimeError, match="stored nothing in a causal forward"):
        cache.update(torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 1, 8), 1)
