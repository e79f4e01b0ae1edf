"""EAGLE-3 heads of speculators, of EAGLE and of SpecForge: what is read, what it computes, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from helpers.conversion import convert, refused, weights
from helpers.eagle import EAGLE_FORMS, eagle_dir, random_head, speculators_dir
from helpers.models import VOCAB, tiny_drafter, tiny_model
from redrafter import CheckpointError, EagleDrafter, MismatchError, ReDrafter
from redrafter.cli import main as redrafter

OF_EAGLE = ("published", "every id", "narrow", "yarn")  # forms that the format without speculators' options can hold


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("bases") / "llama"
    tiny_model("llama").save_pretrained(place)
    return place


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


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "pickle"])
@pytest.mark.parametrize("form", OF_EAGLE)
def test_a_head_of_eagle_is_read_as_it_is(form, pickled, tmp_path, capsys):
    head = random_head(**EAGLE_FORMS[form])
    source = eagle_dir(tmp_path / "theirs", head, pickled=pickled)
    assert_same(EagleDrafter.from_pretrained(convert(tmp_path / "ours", drafter=source, to="drafter")), head)


@pytest.mark.parametrize("write", [speculators_dir, eagle_dir])
def test_a_merged_pair_writes_what_its_base_writes(write, base, tmp_path, capsys):
    source = write(tmp_path / "theirs", random_head(**EAGLE_FORMS["published"]))
    engine = ReDrafter.from_pretrained(convert(tmp_path / "merged", base=base, drafter=source))
    assert isinstance(engine.drafter, EagleDrafter)
    prompt = torch.tensor([[5, 6, 7, 8]])
    expected = engine.model.generate(prompt, max_new_tokens=20, do_sample=False)
    assert torch.equal(engine.generate(prompt, max_new_tokens=20, do_sample=False), expected)


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


def test_info_names_what_it_is(base, tmp_path, capsys):
    source = eagle_dir(tmp_path / "theirs", random_head(**EAGLE_FORMS["published"]))
    assert redrafter(["info", str(source), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == "EAGLE-3 head"
    assert document["drafter"]["type"] == "EAGLE-3 head"
    assert document["drafter"]["target_layers"] == [0, 1]
    assert document["converts_to"]["drafter"] == "yes"
    assert "EAGLE-3" in document["converts_to"]["apple"]
    assert redrafter(["info", str(base), "--drafter", str(source), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["fits"]
    assert document["converts_to"]["redrafter"] == "yes"


def test_a_head_that_was_not_converted_is_named_with_the_command(base, tmp_path):
    source = eagle_dir(tmp_path / "theirs", random_head())
    with pytest.raises(CheckpointError, match=f"redrafter convert --drafter-model-dir {source} --to drafter"):
        ReDrafter.from_pretrained(base, source)
    with pytest.raises(CheckpointError, match="is an EAGLE-3 head, not a model"):
        ReDrafter.from_pretrained(source)


OTHERS: list[tuple[Callable, dict, str]] = [
    (speculators_dir, {"speculators_model_type": "peagle"}, "of the type peagle"),
    (speculators_dir, {"transformer_layer_config": {}}, "a layer of the type None"),
    (speculators_dir, {"eagle_aux_hidden_state_layer_ids": [0, 1]}, "the target's embeddings"),
    (speculators_dir, {"eagle_aux_hidden_state_layer_ids": [2, 1]}, "layer numbers that ascend"),
    (speculators_dir, {"draft_vocab_size": 41}, "has d2t of 40 ids instead of 41"),
    (speculators_dir, {"target_hidden_size": 64}, "own_embedding"),
    (speculators_dir, {"fc_norm": True}, "no tensor fc_norm.0.weight"),
    (eagle_dir, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope of the type dynamic"),
    (eagle_dir, {"rope_scaling": {"type": "mrope"}}, "rope of the type mrope"),
    (eagle_dir, {"num_hidden_layers": 2}, "2 decoder layers"),
    (eagle_dir, {"model_type": "deepseek_v3"}, "a layer of the type deepseek_v3"),
    (eagle_dir, {"norm_output": True}, "norm_output=True outside of speculators' format"),
    (eagle_dir, {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "outside of speculators' format"),
    (eagle_dir, {"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state=False"),
    (eagle_dir, {"eagle_config": {"some_switch": 1}}, "eagle_config.some_switch=1"),
    (eagle_dir, {"quantization_config": {"quant_method": "fp8"}}, "is quantised"),
    (eagle_dir, {"num_key_value_heads": 4}, "k_proj.weight of shape (16, 64) instead of (32, 64)"),
    (eagle_dir, {"vocab_size": 120}, "d2t and t2d that do not name the same ids"),
]


@pytest.mark.parametrize(("write", "changes", "says"), OTHERS)
def test_configs_that_cannot_be_read_are_named(write, changes, says, tmp_path, capsys):
    source = write(tmp_path / "theirs", random_head(**EAGLE_FORMS["published"]), **changes)
    assert says in refused(capsys, drafter=source, to="drafter", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"d2t": None}, "no tensor d2t"),
        ({"d2t": torch.zeros(40).long() - torch.arange(40)}, "does not map to different ids"),
        ({"d2t": torch.full((40,), VOCAB)}, "does not map to different ids"),
        ({"fc.weight": None}, "no tensor fc.weight"),
        ({"midlayer.extra.weight": torch.ones(2)}, "midlayer.extra.weight, which its config does not ask for"),
    ],
    ids=["no map", "twice", "outside", "missing", "extra"],
)
def test_tensors_that_do_not_fit_are_named(change, says, tmp_path, capsys):
    source = eagle_dir(tmp_path / "theirs", random_head(**EAGLE_FORMS["published"]))
    tensors = weights(source) | change
    save_file({name: x for name, x in tensors.items() if x is not None}, source / "model.safetensors")
    assert says in refused(capsys, drafter=source, to="drafter", output=tmp_path / "out")
