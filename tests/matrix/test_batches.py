"""A batch of every feature, drafted for in every way and on every cache, is what undrafted decoding writes."""

import pytest
import torch

from helpers.features import ENGINES, FEATURES, GREEDY, NEW, PAIRS, SAMPLED, case, pair
from helpers.models import paged, row_texts

# The fast cases of test_sequences have each feature with a drafter, and paged caches.
FAST = {("text", engine, "dense") for engine in ENGINES} | {("text", "drafter", "paged")}
CASES = [case(*of, cache, fast=(*of, cache) in FAST) for of in PAIRS for cache in FEATURES[of[0]].caches]
SHORT = NEW // 2  # of a row alone, whose text begins as that of a longer one does


@pytest.mark.parametrize(("feature", "engine", "cache"), CASES)
def test_a_batch_is_what_plain_decoding_writes(feature, engine, cache):
    made = pair(feature, engine)
    made.engine.drop_graphs()
    cached = paged(made.engine) if cache == "paged" else made.engine
    batch = made.batch()
    plain = [cached.generate(**batch, **made.rows, **draws, speculate=False) for draws in (GREEDY, SAMPLED)]
    if not made.feature.images:
        made.expect([text for texts in plain for text in row_texts(texts, batch["attention_mask"]).tolist()])
    with made.watched():
        outs = [
            cached.generate(**batch, **made.rows, **draws, return_dict_in_generate=True) for draws in (GREEDY, SAMPLED)
        ]
    greedy, sampled = (out.sequences for out in outs)
    assert torch.equal(greedy, plain[0])
    assert torch.equal(sampled, plain[1])
    if engine.endswith("and text"):
        assert all(out.stats.copied > NEW for out in outs), "few copies were accepted, and hardly any state kept"
    if made.greedy_texts is not None:
        assert torch.equal(greedy, made.greedy_texts)
    if not made.feature.images:
        ids, mask = batch["input_ids"], batch["attention_mask"].bool()
        for row, name in enumerate(made.names):
            draws = SAMPLED | {"seed": SAMPLED["seed"] + row, "max_new_tokens": SHORT}
            alone = cached.generate(ids[row][mask[row]][None], adapter=name, **draws)[0]
            assert torch.equal(alone[-SHORT:], sampled[row, ids.shape[1] :][:SHORT])
