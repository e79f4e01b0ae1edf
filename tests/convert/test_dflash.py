"""DFlash, DFlash2 and DSpark drafters of other projects: what is read, what it computes, and what is refused."""

import pytest
import torch
import transformers
from torch import Tensor

from helpers.conversion import config, convert, refused, weights
from helpers.dflash import BLOCK, DFLASH_FORMS, published_dir, random_block_drafter
from helpers.eagle import target_outputs
from helpers.models import HIDDEN, VOCAB, tiny_model
from redrafter import DFlashDrafter
from redrafter.drafting.dflash_layers import CopiedContext

KINDS = {  # which formats can hold a form
    "DFlash": ("zlab", "speculators"),
    "speculators'": ("speculators",),
    "sliding": ("zlab", "speculators"),
    "DSpark": ("zlab", "deepspec", "speculators"),
    "gated": ("speculators",),
    "recurrent": ("deepspec",),
    "DFlash2": ("zlab", "speculators"),
}


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


@pytest.mark.parametrize("form", [form for form, kinds in KINDS.items() if "speculators" in kinds])
def test_a_drafter_is_written_as_speculators_writes_it(form, tmp_path, capsys):
    drafter = random_block_drafter(**DFLASH_FORMS[form], base_model="some/base")
    drafter.save_pretrained(tmp_path / "ours")
    theirs = convert(tmp_path / "theirs", drafter=tmp_path / "ours", to="speculators")
    published = published_dir(tmp_path / "published", drafter, "speculators", architectures=None)
    found, expected = config(theirs), config(published)
    kind = drafter.config.algorithm
    assert found["architectures"] == [
        {"dflash": "DFlash", "dspark": "DSpark", "dflash2": "DFlash2"}[kind] + "DraftModel"
    ]
    assert found["speculators_config"]["algorithm"] == kind
    assert found["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == drafter.config.drafts
    layers = found["transformer_layer_config"]
    assert (
        expected["transformer_layer_config"].items() <= (layers | {"sliding_window": layers["sliding_window"]}).items()
    )
    same = expected.keys() - {"architectures", "speculators_config", "transformer_layer_config"}
    assert {name: found[name] for name in same} == {name: expected[name] for name in same}
    ours, others = weights(theirs), weights(published)
    assert ours.keys() == {name for name in others if "confidence_head" not in name}
    assert all(torch.equal(ours[name], others[name]) for name in ours)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"causal": "all"}, "speculators' format has no dflash drafter with causal='all'"),
        ({"logit_scale": 0.5}, "has no dflash drafter with logit_scale=0.5"),
        (DFLASH_FORMS["DFlash2"] | {"sample_from_anchor": True}, "no dflash2 drafter with sample_from_anchor=True"),
        (DFLASH_FORMS["DFlash2"] | {"markov_rank": 4}, "no drafter with both a Markov head and a selector"),
    ],
)
def test_a_drafter_that_speculators_cannot_hold_is_refused_by_name(changes, message, tmp_path, capsys):
    random_block_drafter(**changes).save_pretrained(tmp_path / "ours")
    error = refused(capsys, drafter=tmp_path / "ours", to="speculators", output=tmp_path / "theirs")
    assert message in error


@pytest.mark.skipif(not hasattr(transformers, "MuseGlimmerAssistantModel"), reason="transformers has no such model yet")
@pytest.mark.parametrize(
    "kinds", [["full_attention"] * 2, ["full_attention", "sliding_attention"]], ids=["full", "sliding"]
)
def test_a_drafter_of_transformers_computes_what_its_own_class_computes(kinds, tmp_path, capsys):
    from transformers.cache_utils import DFlashCache

    torch.manual_seed(3)
    shape = transformers.MuseGlimmerAssistantConfig(
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
    theirs = transformers.MuseGlimmerAssistantModel(shape).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    found = DFlashDrafter.from_pretrained(convert(tmp_path / "ours", drafter=tmp_path / "theirs", to="drafter")).eval()
    model, text = tiny_model("llama"), torch.arange(20, 61)
    with torch.no_grad():
        features = target_outputs(model, text[:-1], [0, 1])
        block = torch.tensor([[int(text[-1])] + [VOCAB - 1] * (BLOCK - 1)])
        cache = DFlashCache(config=shape)
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

        def read(layer: int, position: Tensor) -> CopiedContext:
            part = slice(layer * heads, (layer + 1) * heads)
            seen = found.seen_in(layer, torch.ones(1, 1, 40, dtype=torch.bool), place, position[:, None])
            return CopiedContext(keys[:, :, part], values[:, :, part], seen)

        opened = found.open_block(text[None, -1:], features[None, -1], model.get_input_embeddings())
        hidden = found.fill(opened, torch.tensor([40]), read)
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)
