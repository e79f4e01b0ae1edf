"""DFlash, DFlash2 and DSpark drafters of other projects: what is read, what it computes, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from helpers.conversion import convert, refused, weights
from helpers.dflash import BLOCK, DFLASH_FORMS, published_dir, random_block_drafter
from helpers.eagle import target_outputs
from helpers.models import HIDDEN, VOCAB, tiny_model
from redrafter import CheckpointError, DFlashDrafter, MismatchError, ReDrafter
from redrafter.cli import main as redrafter
from redrafter.drafting.dflash import LayerContext

KINDS = {  # which formats can hold a form
    "DFlash": ("zlab", "speculators"),
    "speculators'": ("speculators",),
    "sliding": ("zlab", "speculators"),
    "DSpark": ("zlab", "deepspec", "speculators"),
    "gated": ("speculators",),
    "recurrent": ("deepspec",),
    "DFlash2": ("zlab",),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("bases") / "llama"
    tiny_model("llama").save_pretrained(place)
    return place


@pytest.mark.parametrize(("form", "kind"), [(form, kind) for form, kinds in KINDS.items() for kind in kinds])
def test_a_drafter_is_read_as_it_is(form, kind, tmp_path, capsys):
    drafter = random_block_drafter(**DFLASH_FORMS[form])
    source = published_dir(tmp_path / "theirs", drafter, kind)
    found = DFlashDrafter.from_pretrained(convert(tmp_path / "ours", drafter=source, to="drafter"))
    mine, theirs = found.state_dict(), drafter.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    differ = {
        "_name_or_path",
        "base_model",
        "max_position_embeddings",
        "architectures",
        "dtype",
        "transformers_version",
    }
    ours, expected = (config.to_dict() for config in (found.config, drafter.config))
    if not drafter.config.sliding_layers:
        differ.add("causal")  # says the same of any layer
    assert {name: ours[name] for name in ours if name not in differ} == {
        name: expected[name] for name in ours if name not in differ
    }


@pytest.mark.parametrize("form", ["DFlash", "DSpark", "DFlash2"])
def test_a_merged_pair_writes_what_its_base_writes(form, base, tmp_path, capsys):
    drafter = random_block_drafter(**DFLASH_FORMS[form])
    if drafter.embed_tokens is not None:  # copies of the base's
        model = tiny_model("llama")
        drafter.embed_tokens.weight.data.copy_(model.get_input_embeddings().weight)
        drafter.lm_head.weight.data.copy_(model.lm_head.weight)
    source = published_dir(tmp_path / "theirs", drafter, "zlab")
    engine = ReDrafter.from_pretrained(convert(tmp_path / "merged", base=base, drafter=source))
    assert isinstance(engine.drafter, DFlashDrafter)
    assert engine.drafter.embed_tokens is engine.drafter.lm_head is None
    prompt = torch.tensor([[5, 6, 7, 8]])
    expected = engine.model.generate(prompt, max_new_tokens=20, do_sample=False)
    assert torch.equal(engine.generate(prompt, max_new_tokens=20, do_sample=False), expected)


@pytest.mark.skipif(not hasattr(transformers, "MuseGlimmerAssistantModel"), reason="transformers has no such model yet")
@pytest.mark.parametrize(
    "kinds", [["full_attention"] * 2, ["full_attention", "sliding_attention"]], ids=["full", "sliding"]
)
def test_a_drafter_of_transformers_computes_what_its_own_class_computes(kinds, tmp_path, capsys):
    from transformers.cache_utils import DFlashCache

    torch.manual_seed(3)
    config = transformers.MuseGlimmerAssistantConfig(
        hidden_size=HIDDEN,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=96,
        layer_types=kinds,
        sliding_window=7,
        block_size=BLOCK,
        mask_token_id=VOCAB - 1,
        target_layer_ids=[0, 1],
        vocab_size=VOCAB,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        initializer_range=0.3,
    )
    theirs = transformers.MuseGlimmerAssistantModel(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    found = DFlashDrafter.from_pretrained(convert(tmp_path / "ours", drafter=tmp_path / "theirs", to="drafter")).eval()
    model, text = tiny_model("llama"), torch.arange(20, 61)
    with torch.no_grad():
        features = target_outputs(model, text[:-1], [0, 1])
        block = torch.tensor([[int(text[-1])] + [VOCAB - 1] * (BLOCK - 1)])
        cache = DFlashCache(config=config)
        cache.activate_past_recording()
        cache.set_previous_accepted_tokens(40)
        expected = theirs(
            noise_embeds=model.get_input_embeddings()(block),
            context_hidden_states=features[None],
            past_key_values=cache,
            position_ids=torch.arange(40 + BLOCK)[None],
            attention_mask=torch.ones(1, 40 + BLOCK),
        ).last_hidden_state
        place, heads = torch.arange(40)[None], found.config.num_key_value_heads
        last = torch.zeros(1, 40, HIDDEN)
        keys, values = found.remember(found.fuse_hidden(torch.cat([last, features[None]], dim=-1)), place)

        def read(layer: int) -> LayerContext:
            part = slice(layer * heads, (layer + 1) * heads)
            return LayerContext(keys[:, :, part], values[:, :, part], place)

        hidden = found(text[None, -1:], torch.tensor([40]), read, model.get_input_embeddings())
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)


def test_info_names_what_it_is(base, tmp_path, capsys):
    source = published_dir(tmp_path / "theirs", random_block_drafter(**DFLASH_FORMS["DFlash2"]), "zlab")
    assert redrafter(["info", str(source), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == document["drafter"]["type"] == "DFlash drafter"
    assert document["drafter"]["selector_top_k"] == 9
    assert document["converts_to"]["drafter"] == "yes"
    assert "DFlash" in document["converts_to"]["apple"]
    with pytest.raises(CheckpointError, match=f"redrafter convert --drafter-model-dir {source} --to drafter"):
        ReDrafter.from_pretrained(base, source)


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("zlab", {"block_size": None}, "has no block_size"),
        ("zlab", {"dflash_config": {"target_layer_ids": [0, 1]}}, "has no mask_token_id"),
        ("zlab", {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 0]}}, "layer numbers that ascend"),
        ("zlab", {"dflash_config": {"mask_token_id": VOCAB, "target_layer_ids": [0, 1]}}, "mask_token_id must"),
        ("zlab", {"dflash_config": {"attention_sink_bias": True}}, "dflash_config.attention_sink_bias=True"),
        ("zlab", {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0]}}, "fc.weight of shape"),
        ("zlab", {"num_hidden_layers": 3, "layer_types": None}, "no tensor layers.2."),
        ("zlab", {"model_type": "gemma4_text"}, "a layer of the type gemma4_text"),
        ("zlab", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope of the type dynamic"),
        ("zlab", {"quantization_config": {"quant_method": "fp8"}}, "is quantised"),
        ("speculators", {"aux_hidden_state_layer_ids": [0, 1]}, "the target's embeddings"),
        ("speculators", {"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids=None"),
    ],
    ids=str,
)
def test_configs_that_cannot_be_read_are_named(kind, changes, says, tmp_path, capsys):
    source = published_dir(tmp_path / "theirs", random_block_drafter(), kind, **changes)
    assert says in refused(capsys, drafter=source, to="drafter", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_norm.weight": None}, "no tensor hidden_norm.weight"),
        ({"layers.0.self_attn.sinks": torch.ones(2)}, "layers.0.self_attn.sinks, which its config does not ask for"),
        ({"norm.weight": torch.ones(3)}, "norm.weight of shape (3,) instead of (32,)"),
    ],
    ids=["missing", "extra", "misshapen"],
)
def test_tensors_that_do_not_fit_are_named(change, says, tmp_path, capsys):
    source = published_dir(tmp_path / "theirs", random_block_drafter(), "zlab")
    tensors = weights(source) | change
    save_file({name: x for name, x in tensors.items() if x is not None}, source / "model.safetensors")
    assert says in refused(capsys, drafter=source, to="drafter", output=tmp_path / "out")


def test_a_drafter_of_another_base_is_refused(base, tmp_path, capsys):
    drafter = random_block_drafter(vocab_size=VOCAB + 3)
    source = published_dir(tmp_path / "theirs", drafter, "zlab", vocab_size=VOCAB + 3)
    ours = convert(tmp_path / "ours", drafter=source, to="drafter")
    with pytest.raises(MismatchError, match="a vocabulary of 100"):
        ReDrafter.from_pretrained(base, ours)
