"""EAGLE-3 heads of speculators, of EAGLE and of SpecForge: what is read, what it computes, and what is refused."""

import json

import pytest
import torch
from huggingface_hub import ModelCard

from helpers.conversion import convert, refused, weights
from helpers.eagle import EAGLE_FORMS, eagle_dir, random_head, speculators_dir
from helpers.models import tiny_drafter, tiny_model
from redrafter import EagleDrafter, MismatchError, ReDrafter

OF_EAGLE = ("published", "every id", "narrow", "yarn")  # forms that the format without speculators' options can hold


def assert_same(found: EagleDrafter, head: EagleDrafter) -> None:
    """Fail unless two heads have the same tensors and the same form."""
    mine, theirs = found.state_dict(), head.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    names = ("draft_vocab_size", "target_layers", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    names += ("qk_norm", "own_embedding", "rms_norm_eps", "width", "hidden_size", "head_dim", "num_key_value_heads")
    for name in names:
        assert getattr(found.config, name) == getattr(head.config, name), name
    assert {"rope_theta": 10_000.0} | found.config.rope == {"rope_theta": 10_000.0} | head.config.rope


@pytest.mark.parametrize("form", EAGLE_FORMS)
def test_a_head_of_speculators_is_read_as_it_is(form, tmp_path, capsys):
    head = random_head(**EAGLE_FORMS[form])
    source = speculators_dir(tmp_path / "theirs", head)
    convert(tmp_path / "ours", drafter=source, to="drafter")
    found = EagleDrafter.from_pretrained(tmp_path / "ours")
    assert_same(found, head)
    assert found.config.draft_len_per_beam == 3
    assert found.config.base_model == "some/base"


@pytest.mark.parametrize("form", EAGLE_FORMS)
def test_a_head_is_written_as_speculators_writes_it(form, tmp_path, capsys):
    """Names, numbers and config are those of a head that was published; converted back, it is the head it was."""
    head = random_head(**EAGLE_FORMS[form] | {"draft_len_per_beam": 3, "base_model": "some/base"})
    head.save_pretrained(tmp_path / "ours")
    theirs, written = speculators_dir(tmp_path / "theirs", head), tmp_path / "written"
    convert(written, drafter=tmp_path / "ours", to="speculators")
    found, expected = weights(written), weights(theirs)
    assert found.keys() == expected.keys() | {"d2t", "t2d"}
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (found["d2t"].dtype, found["t2d"].dtype) == (torch.int64, torch.bool)
    config, published = (json.loads((place / "config.json").read_text()) for place in (written, theirs))
    assert published["speculators_config"]["verifier"].pop("architectures")
    layer = config["transformer_layer_config"]
    for key, value in published["transformer_layer_config"].items():
        if key != "rope_scaling":
            assert layer[key] == value, key
    scaling = published["transformer_layer_config"]["rope_scaling"] or {"rope_type": "default"}
    assert layer["rope_parameters"] == scaling | {"rope_theta": layer["rope_theta"]}
    for key in published.keys() - {"transformer_layer_config", "speculators_config"}:
        assert config.get(key, False) == published[key], key
    asked, given = config["speculators_config"], published["speculators_config"]
    assert asked["verifier"]["name_or_path"] == given["verifier"]["name_or_path"]
    assert given["proposal_methods"][0].items() <= asked["proposal_methods"][0].items()
    assert (asked["algorithm"], asked["default_proposal_method"]) == ("eagle3", "greedy")
    back = EagleDrafter.from_pretrained(convert(tmp_path / "back", drafter=written, to="drafter"))
    assert_same(back, head)


def test_what_another_engine_has_to_find_is_said(base, tmp_path, capsys):
    random_head(target_layers=[0, 2]).save_pretrained(tmp_path / "head")
    convert(tmp_path / "out", base=base, drafter=tmp_path / "head", to="speculators")
    assert "the output of the base's last layer, 2, which vLLM does not give" in capsys.readouterr().err
    verifier = json.loads((tmp_path / "out" / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": str(base), "architectures": ["LlamaForCausalLM"]}
    random_head(base_model="name").save_pretrained(tmp_path / "named")
    convert(tmp_path / "lost", drafter=tmp_path / "named", to="speculators")
    assert "the base is written as 'name'" in capsys.readouterr().err
    tiny_drafter().save_pretrained(tmp_path / "recurrent")
    error = refused(capsys, output=tmp_path / "none", drafter=tmp_path / "recurrent", to="speculators")
    assert "cannot hold a recurrent drafter; `redrafter train --form eagle3`" in error


def test_a_converted_drafter_has_a_card_with_what_the_hub_reads(base, tmp_path, capsys):
    source = speculators_dir(tmp_path / "theirs", random_head())
    ours = convert(tmp_path / "ours", base=base, drafter=source, to="drafter")
    card = ModelCard.load(ours / "README.md")
    expected = {"library_name": "redrafter", "pipeline_tag": "text-generation", "base_model": "some/base"}
    assert card.data.to_dict() == expected | {"tags": ["redrafter", "speculative-decoding", "eagle3"]}
    assert 'from_pretrained("some/base", ' in card.text
    (ours / "README.md").write_text(f"{card}\n## Measured by its author\n")
    theirs = ModelCard.load(convert(tmp_path / "out", drafter=ours, to="speculators") / "README.md")
    assert theirs.data.tags == ["redrafter", "speculative-decoding", "eagle3", "speculators"]
    assert theirs.text.endswith("## Measured by its author\n")


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "pickle"])
@pytest.mark.parametrize("form", OF_EAGLE)
def test_a_head_of_eagle_is_read_as_it_is(form, pickled, tmp_path, capsys):
    head = random_head(**EAGLE_FORMS[form])
    source = eagle_dir(tmp_path / "theirs", head, pickled=pickled)
    assert_same(EagleDrafter.from_pretrained(convert(tmp_path / "ours", drafter=source, to="drafter")), head)


@pytest.mark.parametrize("copied", [True, False])
def test_a_copy_of_the_bases_embeddings_is_shared(copied, base, tmp_path, capsys):
    head = random_head(own_embedding=True)
    if copied:
        head.embed_tokens.weight.data.copy_(tiny_model("llama").get_input_embeddings().weight)
    source = speculators_dir(tmp_path / "theirs", head)
    found = EagleDrafter.from_pretrained(convert(tmp_path / "ours", base=base, drafter=source, to="drafter"))
    assert found.config.own_embedding is not copied
    assert (found.embed_tokens is None) is copied


@pytest.mark.parametrize("write", [speculators_dir, eagle_dir])
def test_layers_that_are_not_named_follow_from_the_base(write, tmp_path, capsys):
    head = random_head(target_layers=None)
    convert(tmp_path / "ours", drafter=write(tmp_path / "theirs", head), to="drafter")
    deep = tiny_model("llama", num_hidden_layers=8)
    engine = ReDrafter.from_pretrained(deep, tmp_path / "ours")
    assert engine.target.aux_layers == (1, 3, 4)
    with pytest.raises(MismatchError, match="3 are too few"):
        ReDrafter.from_pretrained(tiny_model("llama"), tmp_path / "ours")
