"""EAGLE-3 heads as drafters: what they find in the cache is what the whole text gives, and the text is the target's."""

from collections.abc import Iterator

import pytest
import torch

from helpers.eagle import EAGLE_FORMS, checked_drafts, random_head
from helpers.generation import ON_BOTH_CACHES, noted, same_as_model, same_undrafted
from helpers.models import VOCAB, tiny_model, uneven_batch, with_tree
from redrafter import ArgumentError, CheckpointError, MismatchError, RecurrentDrafter, ReDrafter
from redrafter.drafting.eagle import EagleProposer


@pytest.fixture
def checks() -> Iterator[None]:
    with checked_drafts():
        yield


def engine_of(architecture: str = "llama", beams: int = 4, depth: int = 3, **changes: object) -> ReDrafter:
    return with_tree(tiny_model(architecture), random_head(**changes), beams, depth)


@pytest.mark.parametrize("form", EAGLE_FORMS)
@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_drafts_of_every_form_follow_from_the_whole_text_and_change_nothing(architecture, form, checks):
    same_as_model(engine_of(architecture, **EAGLE_FORMS[form]), *uneven_batch(), max_new_tokens=24)


@ON_BOTH_CACHES
def test_a_text_may_be_read_in_parts(on, checks, monkeypatch):
    monkeypatch.setattr("redrafter.drafting.eagle.ENTRIES_AT_ONCE", 7)
    same_as_model(on(engine_of(**EAGLE_FORMS["published"])), *uneven_batch(), max_new_tokens=20)


def test_the_map_of_ids_says_what_is_drafted(monkeypatch):
    engine, trees = engine_of(**EAGLE_FORMS["published"]), noted(monkeypatch, EagleProposer, "propose")
    engine.generate(torch.arange(3, 20)[None], max_new_tokens=20, do_sample=False)
    drafted = {token for tree in trees for token in tree.tokens[:, 1:].flatten().tolist()}
    assert len(drafted) > 1
    assert drafted <= set(engine.drafter.draft_ids.tolist())


def test_a_head_reads_its_layers_and_no_other_drafter_may(tmp_path):
    engine = engine_of()
    with pytest.raises(MismatchError, match="load the target anew"):
        ReDrafter(engine.target, random_head())
    with pytest.raises(MismatchError, match="reads layer 7"):
        engine_of(target_layers=[1, 7])


def test_a_saved_head_is_loaded_as_it_was(tmp_path):
    head, ids = random_head(**EAGLE_FORMS["3.1"]), torch.arange(3, 12)[None]
    head.save_pretrained(tmp_path)
    engine = ReDrafter.from_pretrained(tiny_model("llama"), tmp_path, num_beams=3, draft_len_per_beam=2)
    loaded = engine.drafter.state_dict()
    assert all(torch.equal(loaded[name], x) for name, x in head.state_dict().items())
    same_undrafted(engine, ids, max_new_tokens=9)
    with pytest.raises(CheckpointError, match="of the type redrafter_eagle3"):
        RecurrentDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"num_key_value_heads": 3},
        {"head_dim": 7},
        {"rope": {"rope_type": "dynamic"}},
        {"target_layers": [2, 1]},
        {"width": 16},
        {"draft_vocab_size": VOCAB + 1},
        {"hidden_act": "none"},
        {"rms_norm_eps": 2.0},
        {"fc_norm": True, "norm_before_fc": True},
        {"qk_norm": 1},
    ],
    ids=str,
)
def test_a_config_that_cannot_be_is_refused(change):
    with pytest.raises(ArgumentError, match="EagleConfig"):
        random_head(**change)
