"""EAGLE-3 heads as drafters: what they find in the cache is what the whole text gives, and the text is the target's."""

from collections.abc import Iterator

import pytest
import torch

from helpers.eagle import EAGLE_FORMS, checked_drafts, random_head
from helpers.models import VOCAB, paged, tiny_model, uneven_batch, with_tree
from redrafter import ArgumentError, CheckpointError, MismatchError, RecurrentDrafter, ReDrafter
from redrafter.drafting.eagle import EagleProposer
from redrafter.tree.token_tree import Tree

ON = pytest.mark.parametrize("on", [lambda engine: engine, paged], ids=["dense", "paged"])


@pytest.fixture
def checks() -> Iterator[None]:
    with checked_drafts():
        yield


def engine_of(architecture: str = "llama", beams: int = 4, depth: int = 3, **changes: object) -> ReDrafter:
    engine = with_tree(tiny_model(architecture), random_head(**changes), beams, depth)
    engine.pauses = False
    return engine


@pytest.mark.parametrize("form", EAGLE_FORMS)
def test_drafts_follow_from_the_whole_text(form, checks):
    engine = engine_of(**EAGLE_FORMS[form])
    ids, mask = uneven_batch()
    engine.generate(ids, mask, max_new_tokens=24, do_sample=False)


@ON
def test_a_text_may_be_read_in_parts(on, checks, monkeypatch):
    monkeypatch.setattr("redrafter.drafting.eagle.ENTRIES_AT_ONCE", 7)
    engine = on(engine_of(**EAGLE_FORMS["published"]))
    engine.generate(*uneven_batch(), max_new_tokens=20, do_sample=False)


@pytest.mark.parametrize("form", [name for name in EAGLE_FORMS if name != "published"])
@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_every_form_writes_what_model_generate_writes(architecture, form):
    engine = engine_of(architecture, **EAGLE_FORMS[form])
    ids, mask = uneven_batch()
    expected = engine.model.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False)
    assert torch.equal(engine.generate(ids, mask, max_new_tokens=16, do_sample=False), expected)


def test_the_map_of_ids_says_what_is_drafted():
    engine = engine_of(**EAGLE_FORMS["published"])
    known, drafted = set(engine.drafter.draft_ids.tolist()), set()
    propose = EagleProposer.propose

    def kept(self: EagleProposer, *arguments: object) -> Tree:
        tree = propose(self, *arguments)
        drafted.update(tree.tokens[:, 1:].flatten().tolist())
        return tree

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EagleProposer, "propose", kept)
        engine.generate(torch.arange(3, 20)[None], max_new_tokens=20, do_sample=False)
    assert len(drafted) > 1
    assert drafted <= known


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
    assert torch.equal(engine.generate(ids, max_new_tokens=9), engine.generate(ids, max_new_tokens=9, speculate=False))
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
