"""EAGLE-3 heads, DFlash, DFlash2 and DSpark drafters of other projects: what is read, and what is refused by name."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from helpers.conversion import convert, refused, weights
from helpers.dflash import DFLASH_FORMS, published_dir, random_block_drafter
from helpers.eagle import EAGLE_FORMS, eagle_dir, random_head, speculators_dir
from helpers.generation import same_undrafted
from helpers.models import VOCAB, tiny_model
from redrafter import CheckpointError, DFlashDrafter, EagleDrafter, MismatchError, ReDrafter
from redrafter.cli import main as redrafter
from redrafter.formats.sources import load_drafter_model

zlab, block_speculators = partial(published_dir, kind="zlab"), partial(published_dir, kind="speculators")


def head(**changes: object) -> EagleDrafter:
    return random_head(**EAGLE_FORMS["published"] | changes)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("write", "drafter"),
    [
        (speculators_dir, head),
        (eagle_dir, head),
        *((zlab, partial(random_block_drafter, **DFLASH_FORMS[form])) for form in ("DFlash", "DSpark", "DFlash2")),
    ],
    ids=["speculators'", "EAGLE's", "DFlash", "DSpark", "DFlash2"],
)
def test_a_pair_writes_what_its_base_writes_merged_or_as_it_was_published(write, drafter, base, tmp_path, capsys):
    made = drafter()
    copies = isinstance(made, DFlashDrafter) and made.embed_tokens is not None
    if copies:  # of the base's
        model = tiny_model("llama")
        made.embed_tokens.weight.data.copy_(model.get_input_embeddings().weight)
        made.lm_head.weight.data.copy_(model.lm_head.weight)
    source = write(tmp_path / "theirs", made)
    engine = ReDrafter.from_pretrained(convert(tmp_path / "merged", base=base, drafter=source))
    assert isinstance(engine.drafter, type(made))
    assert not copies or engine.drafter.embed_tokens is engine.drafter.lm_head is None
    prompt = torch.tensor([[5, 6, 7, 8]])
    expected = engine.model.generate(prompt, max_new_tokens=20, do_sample=False)
    assert torch.equal(engine.generate(prompt, max_new_tokens=20, do_sample=False), expected)
    direct, runs = ReDrafter.from_pretrained(base, source), []
    for sampling in ({"do_sample": False}, {"do_sample": True, "seed": 3}):
        how = {"max_new_tokens": 20, "return_dict_in_generate": True} | sampling
        runs.append((direct.generate(prompt, **how), engine.generate(prompt, **how)))
        same_undrafted(direct, prompt, max_new_tokens=20, **sampling)
    assert torch.equal(runs[0][0].sequences, expected)
    assert all(one.stats.steps == other.stats.steps for one, other in runs)  # the same drafts


@pytest.mark.parametrize(
    ("write", "drafter", "kind", "facts"),
    [
        (eagle_dir, head, "EAGLE-3 head", {"target_layers": [0, 1]}),
        (zlab, partial(random_block_drafter, **DFLASH_FORMS["DFlash2"]), "DFlash drafter", {"selector_top_k": 9}),
    ],
)
def test_info_names_what_it_is_and_who_loads_it_the_command(write, drafter, kind, facts, base, tmp_path, capsys):
    source = write(tmp_path / "theirs", drafter())
    assert redrafter(["info", str(source), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == document["drafter"]["type"] == kind
    assert facts.items() <= document["drafter"].items()
    assert document["converts_to"]["drafter"] == "yes"
    assert kind.split()[0] in document["converts_to"]["apple"]
    assert redrafter(["info", str(base), "--drafter", str(source), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["fits"]
    assert document["converts_to"]["redrafter"] == "yes"
    with pytest.raises(CheckpointError, match=f"redrafter convert --drafter-model-dir {source} --to drafter"):
        type(drafter()).from_pretrained(source)
    with pytest.raises(CheckpointError, match=rf"is an? {kind}, not a model"):
        ReDrafter.from_pretrained(source)


IDS = {"target_layer_ids": [0, 1]}
CONFIGS: list[tuple[Callable[..., Path], dict, str]] = [
    (speculators_dir, {"speculators_model_type": "medusa"}, "type medusa; of speculators' types, eagle3, dflash,"),
    (speculators_dir, {"speculators_model_type": "peagle"}, "of the kind P-EAGLE, which is not read: train a head"),
    (speculators_dir, {"speculators_model_type": "mtp"}, "with `speculators stitch-mtp DRAFTER BASE`"),
    (block_speculators, {"speculators_model_type": "xpress"}, "of the kind XPress"),
    (block_speculators, {"projector_type": "domino"}, "of the kind Domino"),
    (zlab, {"dflash_config": {"projector_type": "domino", "gru_hidden_dim": 4}}, "of the kind Domino, which is not"),
    (zlab, {"architectures": ["LiLiCorrDraftModel"]}, "of the kind LiLiCorr"),
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
    (eagle_dir, {"num_key_value_heads": 4}, "k_proj.weight of shape (16, 64) instead of (32, 64)"),
    (eagle_dir, {"vocab_size": 120}, "d2t and t2d that do not name the same ids"),
    (zlab, {"block_size": None}, "has no block_size"),
    (zlab, {"dflash_config": IDS}, "has no mask_token_id"),
    (zlab, {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 0]}}, "layer numbers that ascend"),
    (zlab, {"dflash_config": IDS | {"mask_token_id": VOCAB}}, "mask_token_id must"),
    (zlab, {"dflash_config": {"attention_sink_bias": True}}, "dflash_config.attention_sink_bias=True"),
    (zlab, {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0]}}, "fc.weight of shape"),
    (zlab, {"num_hidden_layers": 3, "layer_types": None}, "no tensor layers.2."),
    (zlab, {"model_type": "gemma4_text"}, "a layer of the type gemma4_text"),
    (zlab, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope of the type dynamic"),
    (block_speculators, {"aux_hidden_state_layer_ids": [0, 1]}, "the target's embeddings"),
    (block_speculators, {"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids=None"),
]
TENSORS: list[tuple[Callable[..., Path], dict[str, torch.Tensor | None], str]] = [
    (eagle_dir, {"d2t": None}, "no tensor d2t"),
    (eagle_dir, {"d2t": torch.zeros(40).long() - torch.arange(40)}, "d2t that are not different ids"),
    (eagle_dir, {"d2t": torch.full((40,), VOCAB)}, "d2t outside of the"),
    (eagle_dir, {"d2t": torch.arange(40), "t2d": None}, "subtract torch.arange"),
    (eagle_dir, {"d2t": torch.arange(3, 123, 3)}, "rises from each id to the next"),
    (eagle_dir, {"fc.weight": None}, "no tensor fc.weight"),
    (eagle_dir, {"midlayer.extra.weight": torch.ones(2)}, "midlayer.extra.weight, which its config does not ask for"),
    (eagle_dir, {"mask_hidden": torch.ones(1, 1, 96)}, "of the kind P-EAGLE"),
    (zlab, {"prefix_gru.weight_ih_l0": torch.ones(12, 32)}, "of the kind Domino"),
    (zlab, {"hidden_norm.weight": None}, "no tensor hidden_norm.weight"),
    (zlab, {"layers.0.self_attn.sinks": torch.ones(2)}, "self_attn.sinks, which its config does not ask for"),
    (zlab, {"norm.weight": torch.ones(3)}, "norm.weight of shape (3,) instead of (32,)"),
]


def drafter_for(write: Callable[..., Path]) -> EagleDrafter | DFlashDrafter:
    return head() if write in (speculators_dir, eagle_dir) else random_block_drafter()


@pytest.mark.parametrize(("write", "changes", "says"), CONFIGS, ids=[says for *_, says in CONFIGS])
def test_configs_that_cannot_be_read_are_named(write, changes, says, tmp_path, capsys):
    source = write(tmp_path / "theirs", drafter_for(write), **changes)
    assert says in refused(capsys, drafter=source, to="drafter", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("write", "change", "says"), TENSORS, ids=[says for *_, says in TENSORS])
def test_tensors_that_do_not_fit_are_named(write, change, says, tmp_path, capsys):
    source = write(tmp_path / "theirs", drafter_for(write))
    tensors = weights(source) | change
    save_file({name: x for name, x in tensors.items() if x is not None}, source / "model.safetensors")
    assert says in refused(capsys, drafter=source, to="drafter", output=tmp_path / "out")


def test_a_drafter_of_another_base_is_refused(base, tmp_path, capsys):
    source = zlab(tmp_path / "theirs", random_block_drafter(vocab_size=VOCAB + 3), vocab_size=VOCAB + 3)
    ours = convert(tmp_path / "ours", drafter=source, to="drafter")
    with pytest.raises(MismatchError, match="a vocabulary of 100"):
        ReDrafter.from_pretrained(base, ours)


def test_a_loaded_drafter_does_not_change_with_its_file(tmp_path):
    source, ours = speculators_dir(tmp_path / "theirs", head()), head()
    loaded = load_drafter_model(source)
    file = source / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as content:
        content.seek(size // 2)
        content.write(bytes(size - size // 2))
    assert all(torch.equal(x, ours.state_dict()[name]) for name, x in loaded.state_dict().items())
