"""Drafters of blocks: what they compute from the cache is what the whole text gives, and the text is the target's."""

import pytest
import torch

from helpers.dflash import BLOCK, DFLASH_FORMS, FORM, checked_blocks, random_block_drafter
from helpers.generation import noted, same_as_model, same_undrafted
from helpers.models import VOCAB, paged, tiny_model, uneven_batch, with_tree
from redrafter import ArgumentError, DFlashConfig, DFlashDrafter, ReDrafter


def engine_of(architecture: str = "llama", beams: int = 4, depth: int = 3, **changes: object) -> ReDrafter:
    return with_tree(tiny_model(architecture), random_block_drafter(**changes), beams, depth)


@pytest.mark.parametrize("form", DFLASH_FORMS)
@pytest.mark.parametrize("on", [lambda engine: engine, paged], ids=["dense", "paged"])
def test_drafts_of_every_form_follow_from_the_whole_text_and_change_nothing(form, on):
    with checked_blocks():
        engine = on(engine_of(**DFLASH_FORMS[form]))
        same_as_model(engine, *uneven_batch(), max_new_tokens=24)
    same_undrafted(engine, *uneven_batch(), max_new_tokens=24, do_sample=True, seed=3)


@pytest.mark.parametrize("architecture", ["mistral", "gemma2"])
def test_any_base_may_be_drafted_for(architecture):
    with checked_blocks():
        same_as_model(engine_of(architecture), *uneven_batch(), max_new_tokens=24)


@pytest.mark.parametrize("form", ["DFlash", "DSpark", "DFlash2"])
def test_a_saved_drafter_is_loaded_as_it_was(form, tmp_path):
    drafter, ids = random_block_drafter(**DFLASH_FORMS[form]), torch.arange(3, 12)[None]
    drafter.save_pretrained(tmp_path)
    engine = ReDrafter.from_pretrained(tiny_model("llama"), tmp_path)
    assert isinstance(engine.drafter, DFlashDrafter)
    loaded = engine.drafter.state_dict()
    assert all(torch.equal(loaded[name], x) for name, x in drafter.state_dict().items())
    assert engine.proposer.depth == drafter.config.drafts == BLOCK - (form != "DSpark")
    same_undrafted(engine, ids, max_new_tokens=9)


def test_a_block_drafts_no_more_than_it_holds():
    with pytest.raises(ArgumentError, match=f"draft_len_per_beam={BLOCK} is more than the {BLOCK - 1} tokens"):
        engine_of(depth=BLOCK)


def test_drafts_come_from_the_block_under_the_targets_noise():
    """A drafter that computes the target's own logits from its last layer drafts what the target draws."""
    model = tiny_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()  # each token follows from the one before it alone
    drafter = random_block_drafter(block_size=1, sample_from_anchor=True, target_layers=[2])
    with torch.no_grad():
        for layer in drafter.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        drafter.norm.weight.copy_(model.model.norm.weight)
    engine = with_tree(model, drafter, 1, 1)
    for sampling in ({"do_sample": False}, {"do_sample": True, "seed": 5, "temperature": 0.7}):
        out = engine.generate(
            torch.arange(3, 12)[None], max_new_tokens=20, eos_token_id=None, return_dict_in_generate=True, **sampling
        )
        assert out.stats.tokens_per_step > 1.8


@pytest.mark.parametrize(
    "change",
    [
        {"num_key_value_heads": 3},
        {"head_dim": 7},
        {"rope": {"rope_type": "dynamic"}},
        {"target_layers": []},
        {"mask_token_id": VOCAB},
        {"block_size": 1},
        {"causal": "some"},
        {"sliding_layers": [2]},
        {"conv_kernel_size": 2, "conv_group_size": 5},
        {"selector_rank": 4},
        {"draft_vocab_size": 40},
        {"markov_rank": 4, "markov_type": "other"},
        {"draft_len_per_beam": 9},
        {"logit_softcap": -1.0},
    ],
    ids=str,
)
def test_a_config_that_cannot_be_is_refused(change):
    with pytest.raises(ArgumentError, match="DFlashConfig"):
        DFlashConfig(**(FORM | change)).check()


def test_candidates_are_what_the_noise_makes_likeliest(monkeypatch):
    engine, changed = engine_of(**DFLASH_FORMS["DFlash2"]), []

    def note(made: torch.Tensor, selector: object, tokens: torch.Tensor, *given: torch.Tensor) -> None:
        _, logits, scores = given
        found = made[:, 0].isfinite()  # [B, V]
        likeliest = torch.zeros_like(found).scatter(1, scores[:, 0].topk(9).indices, True)
        assert torch.equal(found, likeliest)
        changed.append(not torch.equal(logits.argsort(), scores.argsort()))

    noted(monkeypatch, type(engine.drafter.candidate_selector), "forward", note)
    same_undrafted(engine, torch.arange(3, 12)[None], max_new_tokens=9, do_sample=True, seed=4)
    assert all(changed)
