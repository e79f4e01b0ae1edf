"""Drafters that are saved in 8 bits: a smaller directory, read as any other, with nearly the drafts of before."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from helpers.command_line import ran
from helpers.conversion import config, convert, refused, same, weights
from helpers.eagle import EAGLE_FORMS, random_head, speculators_dir
from helpers.generation import same_undrafted
from redrafter import CheckpointError, RecurrentDrafter, ReDrafter, boxed_pair
from redrafter.drafting.drafter_types import open_drafter_model
from redrafter.formats.sources import load_drafter_model
from redrafter.kernels.grouped_weight import BLOCK, quantize_groups
from redrafter.train.checkpoints import load_drafter

BOXED = boxed_pair() / "drafter"
IDS = torch.tensor([[5, 60, 700, 8], [9, 10, 110, 1200]])


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """The boxed drafter, saved in 8 bits."""
    return convert(tmp_path_factory.mktemp("saved") / "small", drafter=BOXED, to="drafter", dtype="int8")


def test_matrices_are_saved_as_codes_with_a_scale_for_32_and_read_as_their_products(small):
    before, stored, found = weights(BOXED), weights(small), RecurrentDrafter.from_pretrained(small).state_dict()
    matrices = {name for name, x in before.items() if x.dim() == 2 and name.endswith(".weight")}
    assert {name for name, x in stored.items() if x.dtype == torch.int8} == matrices
    assert {name.removesuffix("_scale") for name in stored.keys() - before.keys()} == matrices
    for name, x in before.items():
        wanted = quantize_groups(x, 8).dequantize(x.dtype) if name in matrices else x
        assert torch.equal(found[name], wanted), name
    assert (small / "model.safetensors").stat().st_size < 0.55 * (BOXED / "model.safetensors").stat().st_size


@pytest.mark.parametrize("sampled", [False, True])
def test_texts_are_those_without_drafts_and_most_drafts_are_accepted_as_before(sampled, small, tmp_path):
    merged = convert(tmp_path / "merged", base=boxed_pair(), drafter=small, to="redrafter", dtype="int8")
    assert same(weights(merged / "drafter"), weights(small))
    how = {"max_new_tokens": 60, "do_sample": sampled, "seed": 3, "return_dict_in_generate": True}
    outputs = []
    for pair in ((boxed_pair(),), (boxed_pair(), small), (merged,)):
        engine = ReDrafter.from_pretrained(*pair, dtype="float32", draft_from_text=False)
        engine.pauses = False
        outputs.append(same_undrafted(engine, IDS, **how))
    first, *others = outputs
    for out in others:
        assert torch.equal(out.sequences, first.sequences)
        assert out.stats.tokens_per_step > 0.95 * first.stats.tokens_per_step > 1.5


def test_it_is_trained_saved_and_converted_as_any_drafter(small, tmp_path):
    found = open_drafter_model(small)
    assert same(load_drafter(small).state_dict(), {name: x.float() for name, x in found.state_dict().items()})
    found.save_pretrained(tmp_path / "again")
    wide = convert(tmp_path / "wide", drafter=small, to="drafter")
    for place in (tmp_path / "again", wide):
        assert "quantization_config" not in config(place)
        assert same(open_drafter_model(place).state_dict(), found.state_dict())
    half = convert(tmp_path / "half", drafter=small, to="drafter", dtype="float16")
    assert {x.dtype for x in load_drafter_model(half).parameters()} == {torch.float16}


@pytest.mark.parametrize("check", [[], ["--check"]])
def test_info_names_the_quantisation_and_counts_the_weights_alone(check, small):
    code, out, _ = ran("info", str(small), "--json", *check)
    facts = json.loads(out)["drafter"]
    assert code == 0
    assert facts["quantised"] == "compressed-tensors int-quantized, 8 bits in groups of 32"
    assert facts["parameters"] == open_drafter_model(BOXED).num_parameters()
    assert "quantization_config" not in facts


def test_it_is_read_from_the_hub(small, tmp_path, monkeypatch):
    folder = tmp_path / "models--some--drafter"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    shutil.copytree(small, folder / "snapshots" / "abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert same(load_drafter_model("some/drafter").state_dict(), load_drafter_model(small).state_dict())


def test_a_published_head_in_8_bits_is_read_too(base, tmp_path, small):
    source = speculators_dir(tmp_path / "theirs", random_head(**EAGLE_FORMS["published"]))
    tensors = weights(source)
    for name in [name for name, x in tensors.items() if "_proj.weight" in name and x.shape[1] % BLOCK == 0]:
        weight = quantize_groups(tensors[name], 8)
        tensors |= {name: weight.codes, f"{name}_scale": weight.scale}
    save_file(tensors, source / "model.safetensors")
    settings = {"quantization_config": config(small)["quantization_config"]}
    (source / "config.json").write_text(json.dumps(config(source) | settings))
    same_undrafted(ReDrafter.from_pretrained(base, source), torch.tensor([[5, 6, 7, 8]]), max_new_tokens=20)


def test_a_file_that_is_cut_short_or_lacks_scales_is_named(small, tmp_path):
    place = tmp_path / "broken"
    shutil.copytree(small, place)
    file, tensors = place / "model.safetensors", weights(small)
    file.write_bytes(file.read_bytes()[:-100])
    for load in (load_drafter_model, open_drafter_model, RecurrentDrafter.from_pretrained):
        with pytest.raises(CheckpointError, match=r"broken/model\.safetensors cannot be read"):
            load(place)
    scale = tensors.pop("lm_head.weight_scale")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match="weight of lm_head: it has no weight_scale"):
        load_drafter_model(place)
    save_file(tensors | {"lm_head.weight_scale": scale[:-1]}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match="weight of lm_head: its scales and codes of zero are not 2048 by"):
        load_drafter_model(place)


def test_formats_of_others_have_no_drafters_in_8_bits(pair, tmp_path, capsys):
    for to, given in (("apple", {"drafter": pair["drafter"]}), ("trtllm", pair)):
        error = refused(capsys, **given, to=to, dtype="int8", output=tmp_path / "out")
        assert "has drafters of float32, bfloat16 or float16, not int8" in error
