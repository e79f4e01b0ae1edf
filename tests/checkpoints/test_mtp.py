"""MTP layers that checkpoints hold: what is read, what they compute, what is written with them, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from helpers.generation import ON_BOTH_CACHES
from helpers.models import VOCAB, check_texts, tiny_model, uneven_batch
from helpers.mtp import FORMS, checked_layers, mtp_checkpoint, mtp_tensors, random_mtp
from redrafter import CheckpointError, ReDrafter, UnsupportedError
from redrafter.checkpoints.mtp_layer import find_layer
from redrafter.cli import main as redrafter
from redrafter.drafting.mtp import MTPDrafter
from redrafter.model.target import Target

SHAPE = {"num_beams": 3, "draft_len_per_beam": 3, "node_budget": 99}


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {name: mtp_checkpoint(folder / name, name) for name in FORMS}


@ON_BOTH_CACHES
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.variant] * (name == "qwen3_next")) for name in FORMS]
)
def test_drafts_are_what_the_formula_says_and_change_no_text(name, on, places):
    engine = ReDrafter.from_pretrained(places[name], **SHAPE)
    assert isinstance(engine.drafter, MTPDrafter)
    form = FORMS[name]
    with checked_layers(mtp_tensors(engine.model, form), form):
        check_texts(on(engine), new_tokens=20)


@pytest.mark.parametrize("name", ["deepseek_v3", pytest.param("glm4_moe", marks=pytest.mark.variant)])
def test_the_first_draft_is_that_of_transformers(name, places):
    layers, caches = (pytest.importorskip(f"transformers.{name}") for name in ("modeling_layers", "cache_utils"))
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this version of transformers has no MtpModel")
    model = AutoModelForCausalLM.from_pretrained(places[name])
    vars(model)["_keys_to_ignore_on_load_unexpected"] = [rf"model\.layers\.{model.config.num_hidden_layers}\..*"]
    theirs, cache = layers.MtpModel.from_pretrained(model), caches.MtpCache(config=model.config.get_mtp_config())
    prompt, found = torch.arange(3, 40)[None] * 7 % VOCAB, list[Tensor]()
    with torch.no_grad():
        out = model(prompt, output_hidden_states=True)
        text = torch.cat([prompt, out.logits[:, -1:].argmax(dim=-1)], dim=1)  # with the first token that is written
        positions = torch.arange(1, text.shape[1])[None]
        _, expected, _ = theirs(text[:, 1:], out.hidden_states[-1], None, positions, cache, full_input_ids=text)
    engine = ReDrafter.from_pretrained(places[name], num_beams=1, draft_len_per_beam=1)
    step = engine.drafter.step
    engine.drafter.step = lambda *args: found.append(step(*args)) or found[-1]
    engine.generate(prompt, max_new_tokens=3, do_sample=False)
    logits = model.get_output_embeddings()(found[0][:, 0].clone())
    torch.testing.assert_close(logits, expected[:, 0], atol=1e-4, rtol=1e-4)


def test_a_layer_is_found_in_a_checkpoint_of_several_files(tmp_path):
    place = mtp_checkpoint(tmp_path / "base", "qwen3_5_text", sharded=True)
    engine = ReDrafter.from_pretrained(place, **SHAPE)
    assert isinstance(engine.drafter, MTPDrafter)
    check_texts(engine)


@pytest.mark.parametrize(
    ("name", "tensor", "change", "message"),
    [
        ("mimo", "model.mtp_layers.0.token_layernorm.weight", None, "has no model.mtp_layers.0.token_layernorm.weight"),
        ("mimo", "model.mtp_layers.0.mlp.up_proj.weight", None, "lacks mlp.up_proj.weight"),
        ("mimo", "model.mtp_layers.0.mlp.other", torch.ones(3), "has mlp.other, which its model's layers have not"),
        ("mimo", "model.mtp_layers.0.input_proj.weight", torch.ones(3, 4), r"input_proj.weight of shape \(3, 4\)"),
        ("deepseek_v3", "model.layers.3.mlp.experts.3.up_proj.weight", None, "has mlp.experts.3"),
        ("deepseek_v3", "model.layers.3.mlp.gate.weight", torch.ones(5, 32), r"mlp.gate.weight of shape \(5, 32\)"),
    ],
)
def test_a_layer_that_is_not_whole_is_refused_by_the_name_of_a_tensor(name, tensor, change, message, tmp_path):
    place = mtp_checkpoint(tmp_path / "base", name, **{tensor: change})
    with pytest.raises(CheckpointError, match=message):
        ReDrafter.from_pretrained(place)


def test_a_layer_that_is_called_in_another_way_is_refused():
    with pytest.raises(UnsupportedError, match="layers of Gemma3ForCausalLM cannot be an MTP layer here"):
        random_mtp(Target(tiny_model("gemma3_text")))


def test_weights_in_fp8_are_multiplied_by_the_scales_of_their_blocks(tmp_path):
    name = "model.layers.3.self_attn.o_proj.weight"
    whole = torch.randn(32, 24)
    scale, stored = torch.tensor([[0.5], [2.0]]), whole.to(torch.float8_e4m3fn)
    place = mtp_checkpoint(tmp_path / "base", "deepseek_v3", **{name: stored, f"{name}_scale_inv": scale})
    engine = ReDrafter.from_pretrained(place, **SHAPE)
    expected = stored.float() * scale.repeat_interleave(16, dim=0)
    torch.testing.assert_close(engine.drafter.blocks[0].self_attn.o_proj.weight, expected, atol=0, rtol=0.01)


@pytest.mark.parametrize("name", ["mimo", "deepseek_v3", "qwen3_next", "nemotron_h", "ernie4_5_moe"])
def test_of_several_layers_the_first_drafts(name, places):
    place, blocks = places[name], FORMS[name].likes(AutoModelForCausalLM.from_pretrained(places[name]))
    with safe_open(place / "model.safetensors", framework="pt") as stored:
        names = list(stored.keys())
    found, count = find_layer(names), len(blocks)
    assert found is not None
    assert found.count == 1
    later = []
    for begins, _ in blocks:
        before, number = begins[:-1].rsplit(".", 1)
        later += [x.replace(begins, f"{before}.{int(number) + count}.") for x in names if x.startswith(begins)]
    more = find_layer([*names, *later])
    assert more is not None
    assert (more.count, more.names) == (2, found.names)


def test_a_warning_says_which_of_several_layers_drafts(places, tmp_path):
    place = shutil.copytree(places["mimo"], tmp_path / "two")
    tensors = load_file(place / "model.safetensors")
    more = {x.replace("mtp_layers.0", "mtp_layers.1"): y + 1 for x, y in tensors.items() if "mtp_layers.0" in x}
    save_file(tensors | more, place / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="has 2 MTP layers: the first one drafts all tokens"):
        engine = ReDrafter.from_pretrained(place, **SHAPE)
    assert torch.equal(engine.drafter.projection.weight, tensors["model.mtp_layers.0.input_proj.weight"])


def test_info_shows_the_layer(places, capsys):
    assert redrafter(["info", str(places["deepseek_v3"]), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    drafter = shown["drafter"]
    assert (drafter["type"], drafter["family"], drafter["vocabulary"]) == ("MTP layer", "DeepSeek", VOCAB)
    assert drafter["parameters"] > 32 * 64


def test_a_batch_of_prompts_is_drafted_for_as_each_alone(places):
    engine = ReDrafter.from_pretrained(places["mimo"], **SHAPE)
    ids, mask = uneven_batch(8)
    written = engine.generate(ids, mask, max_new_tokens=20, do_sample=True, seed=list(range(8)))
    for row in range(8):
        prompt = ids[row][mask[row].bool()][None]
        alone = engine.generate(prompt, max_new_tokens=20, do_sample=True, seed=row)
        assert torch.equal(alone[0, prompt.shape[1] :], written[row, ids.shape[1] :])
