"""EAGLE-3 heads and drafters of blocks: the cache gives them what the whole text gives, and they change no text."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import pytest
import torch

from helpers.dflash import BLOCK, DFLASH_FORMS, FORM, checked_blocks, random_block_drafter
from helpers.eagle import EAGLE_FORMS, checked_drafts, random_head
from helpers.generation import ON_BOTH_CACHES, noted, same_as_model, same_undrafted
from helpers.models import VOCAB, paged, tiny_model, uneven_batch, with_tree
from helpers.mtp import random_mtp
from helpers.scheduling import KINDS as SAMPLING
from helpers.scheduling import make_sequence, run, scheduler
from redrafter import (
    ArgumentError,
    CheckpointError,
    DFlashConfig,
    DFlashDrafter,
    EagleDrafter,
    EngineOptions,
    MismatchError,
    RecurrentDrafter,
    ReDrafter,
)
from redrafter.cache.paged import PagedCache
from redrafter.drafting.drafter_model import DrafterModel
from redrafter.drafting.eagle import EagleProposer, PagedPast
from redrafter.model.target import Target


class Kind(NamedTuple):
    """A drafter's class, what makes one with random weights, its forms, and what watches its searches."""

    of: type
    make: Callable[..., DrafterModel]
    forms: dict[str, dict]
    checked: Callable[[], AbstractContextManager[None]]


KINDS = {
    "EAGLE": Kind(EagleDrafter, random_head, EAGLE_FORMS, checked_drafts),
    "blocks": Kind(DFlashDrafter, random_block_drafter, DFLASH_FORMS, checked_blocks),
}


def engine_of(kind: str, architecture: str = "llama", beams: int = 4, depth: int = 3, **changes: object) -> ReDrafter:
    return with_tree(tiny_model(architecture), KINDS[kind].make(**changes), beams, depth)


@ON_BOTH_CACHES
@pytest.mark.parametrize(("kind", "form"), [(name, form) for name, kind in KINDS.items() for form in kind.forms])
def test_drafts_of_every_form_follow_from_the_whole_text_and_change_nothing(kind, form, on):
    with KINDS[kind].checked():
        engine = on(engine_of(kind, **KINDS[kind].forms[form]))
        same_as_model(engine, *uneven_batch(), max_new_tokens=24)
    same_undrafted(engine, *uneven_batch(), max_new_tokens=24, do_sample=True, seed=3)


def drafted(engine: ReDrafter) -> tuple[list[list[int]], int]:
    """Return the text of the uneven batch, and how many drafts were accepted."""
    result = engine.generate(*uneven_batch(), max_new_tokens=24, return_dict_in_generate=True)
    return result.sequences.tolist(), result.stats.accepted


@pytest.mark.parametrize("kind", KINDS)
def test_an_embedding_table_that_is_not_the_bases_is_named_and_can_be_replaced(kind):
    model, make = tiny_model("llama"), KINDS[kind].make
    shared, own = make(), make(own_embedding=True)
    own.load_state_dict(shared.state_dict(), strict=False)
    with pytest.warns(UserWarning, match=r"embedding table is not its base's.*--base-embedding"):
        ReDrafter.from_pretrained(model, own, num_beams=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = ReDrafter.from_pretrained(model, own, num_beams=4, base_embedding=True)
        expected = drafted(ReDrafter.from_pretrained(model, shared, num_beams=4))
        assert drafted(engine) == expected
        copy = make(own_embedding=True)
        copy.embed_tokens.load_state_dict(model.get_input_embeddings().state_dict())
        ReDrafter.from_pretrained(model, copy, num_beams=4)
    with pytest.raises(ArgumentError, match="no embedding table of its own"):
        ReDrafter.from_pretrained(model, shared, num_beams=4, base_embedding=True)


@pytest.fixture
def in_blocks(monkeypatch):
    """Let heads attend to their entries in blocks, as on a GPU; return the paths of their searches."""
    monkeypatch.setattr("redrafter.drafting.eagle.reads_pages", lambda cache: isinstance(cache, PagedCache))
    return noted(monkeypatch, PagedPast, "attend", lambda result, *_: result[1].shape)


@pytest.mark.parametrize("form", EAGLE_FORMS)
def test_drafts_that_read_blocks_follow_from_the_whole_text(form, in_blocks):
    with checked_drafts():
        engine = paged(engine_of("EAGLE", **EAGLE_FORMS[form]))
        same_as_model(engine, *uneven_batch(), max_new_tokens=24)
    assert {shape[1:] for shape in in_blocks} == {(1, 1), (4, 5), (4, 9)}


@pytest.mark.parametrize("how", [{"beams": 1, "depth": 4}, {"beams": 4, "depth": 3, "fp8": True}], ids=str)
def test_drafts_that_read_blocks_are_those_of_copied_entries(how, monkeypatch):
    """Compare trees of prompts that are read in chunks, and of one whose prefix is found."""
    how, trees = dict(how), []
    options = EngineOptions(draft_from_text=False, kv_cache_dtype="fp8" if how.pop("fp8", False) else "auto")
    for blocks in (False, True):
        monkeypatch.setattr("redrafter.drafting.eagle.reads_pages", lambda _, blocks=blocks: blocks)
        engine = engine_of("EAGLE", **how)
        engine.options = options
        served = scheduler(engine, blocks=40, max_num_tokens=16)
        drafted = noted(monkeypatch, EagleProposer, "propose", lambda tree, *_: tree.tokens)
        sequences = [make_sequence([*range(3, 3 + n), 5], 12, SAMPLING["greedy"]) for n in (35, 3, 20)]
        run(served, sequences)
        again = make_sequence([*range(3, 38), 7], 12, SAMPLING["greedy"])
        run(served, [again])
        assert again.reused
        trees.append(list(drafted))
    for tokens, expected in zip(*trees, strict=True):
        assert torch.equal(tokens, expected)


def test_the_map_of_ids_says_what_is_drafted(monkeypatch):
    engine, trees = engine_of("EAGLE", **EAGLE_FORMS["published"]), noted(monkeypatch, EagleProposer, "propose")
    engine.generate(torch.arange(3, 20)[None], max_new_tokens=20, do_sample=False)
    drafted = {token for tree in trees for token in tree.tokens[:, 1:].flatten().tolist()}
    assert len(drafted) > 1
    assert drafted <= set(engine.drafter.draft_ids.tolist())


@pytest.mark.parametrize(
    ("make", "reads"),
    [(lambda _: random_head(), 0), (lambda _: random_block_drafter(), 1), (random_mtp, 3)],
    ids=["EAGLE", "blocks", "MTP"],
)
def test_a_draft_also_reads_the_head_of_its_target_where_it_has_none(make, reads):
    model = tiny_model("llama")
    engine = with_tree(model, make(Target(model)), 4, 3)
    head = VOCAB * engine.target.hidden_size * 4
    assert engine.proposer.draft_bytes == engine.drafter.draft_bytes(3) + reads * head


def test_a_head_reads_its_layers_and_no_other_drafter_may():
    engine = engine_of("EAGLE")
    with pytest.raises(MismatchError, match="load the target again"):
        ReDrafter(engine.target, random_head())
    with pytest.raises(MismatchError, match="reads layer 7"):
        engine_of("EAGLE", target_layers=[1, 7])


@pytest.mark.parametrize(
    ("kind", "form"), [("EAGLE", "3.1"), ("blocks", "DFlash"), ("blocks", "DSpark"), ("blocks", "DFlash2")]
)
def test_a_saved_drafter_is_loaded_as_it_was(kind, form, tmp_path):
    drafter, ids = KINDS[kind].make(**KINDS[kind].forms[form]), torch.arange(3, 12)[None]
    drafter.save_pretrained(tmp_path)
    engine = ReDrafter.from_pretrained(tiny_model("llama"), tmp_path)
    assert isinstance(engine.drafter, KINDS[kind].of)
    loaded = engine.drafter.state_dict()
    assert all(torch.equal(loaded[name], x) for name, x in drafter.state_dict().items())
    assert kind == "EAGLE" or engine.proposer.depth == drafter.config.drafts == BLOCK - (form != "DSpark")
    same_undrafted(engine, ids, max_new_tokens=9)
    with pytest.raises(CheckpointError, match=f"of the type {drafter.config.model_type}"):
        RecurrentDrafter.from_pretrained(tmp_path)


COMMON = [{"num_key_value_heads": 3}, {"head_dim": 7}, {"rope": {"rope_type": "dynamic"}}]
OF_HEADS = [
    {"target_layers": [2, 1]},
    {"width": 16},
    {"draft_vocab_size": VOCAB + 1},
    {"hidden_act": "none"},
    {"rms_norm_eps": 2.0},
    {"fc_norm": True, "norm_before_fc": True},
    {"qk_norm": 1},
]
OF_BLOCKS = [
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
]


@pytest.mark.parametrize("change", COMMON + OF_HEADS, ids=str)
def test_a_config_of_a_head_that_cannot_be_is_refused(change):
    with pytest.raises(ArgumentError, match="EagleConfig"):
        random_head(**change)


@pytest.mark.parametrize("change", COMMON + OF_BLOCKS, ids=str)
def test_a_config_of_blocks_that_cannot_be_is_refused(change):
    with pytest.raises(ArgumentError, match="DFlashConfig"):
        DFlashConfig(**(FORM | change)).check()


def test_a_block_drafts_no_more_than_it_holds():
    with pytest.raises(ArgumentError, match=f"draft_len_per_beam={BLOCK} is more than the {BLOCK - 1} tokens"):
        engine_of("blocks", depth=BLOCK)


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


def test_candidates_are_what_the_noise_makes_likeliest(monkeypatch):
    engine, changed = engine_of("blocks", **DFLASH_FORMS["DFlash2"]), []

    def note(made: torch.Tensor, selector: object, tokens: torch.Tensor, *given: torch.Tensor) -> None:
        _, logits, scores = given
        found = made[:, 0].isfinite()  # [B, V]
        likeliest = torch.zeros_like(found).scatter(1, scores[:, 0].topk(9).indices, True)
        assert torch.equal(found, likeliest)
        changed.append(not torch.equal(logits.argsort(), scores.argsort()))

    noted(monkeypatch, type(engine.drafter.candidate_selector), "forward", note)
    same_undrafted(engine, torch.arange(3, 12)[None], max_new_tokens=9, do_sample=True, seed=4)
    assert all(changed)
