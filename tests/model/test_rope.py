"""Rope that switches where a text outgrows the first context of its model: each row as if it were alone."""

import inspect
from copy import deepcopy

import pytest
import torch
from torch import Tensor
from transformers import Phi3ForCausalLM, PreTrainedModel

from helpers.adapters import adapted
from helpers.models import paged, prompts_of, scripted_engine, tiny_drafter, tiny_model, with_tree
from helpers.scheduling import launch_ahead, make_sequence, run, scheduler
from redrafter import ArgumentError, Engine
from redrafter.sampling.params import SamplingParams

AT, WHOLE, NEW = 64, 256, 24
GREEDY = SamplingParams(temperature=0)
LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.5, 4.0, 9.0, 16.0],
        "original_max_position_embeddings": AT,
        "short_mscale": 1.1,
        "long_mscale": 1.3,
    },
    "max_position_embeddings": WHOLE,
}
# Phi-3 reads a text anew when it crosses; a Llama goes on with the keys that it has.
FAMILIES = {
    "phi3": {"original_max_position_embeddings": AT},
    "phimoe": {"original_max_position_embeddings": AT, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama": {},
}
# Older versions of transformers mean to read it anew, and then read its last token alone.
REREADS = "next_sequence_length" in inspect.getsource(Phi3ForCausalLM.prepare_inputs_for_generation)
if not REREADS:
    del FAMILIES["phi3"], FAMILIES["phimoe"]
LENGTHS = {"short": [9, 30], "long": [90, 70], "crossing": [50, 62, AT, AT - 1], "mixed": [100, 9, 55, AT + 1]}


def switching_model(family: str) -> PreTrainedModel:
    """Return a tiny model whose rope switches at `AT` tokens, and that never ends a text."""
    return tiny_model(family, **deepcopy(LONGROPE), **FAMILIES.get(family, {}), eos_token_id=None)


def alone(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """Return what `model.generate` writes for each row without the others."""
    arguments = {"max_new_tokens": NEW, "do_sample": False}
    return torch.cat(
        [model.generate(row[None, own.bool()], **arguments)[:, -NEW:] for row, own in zip(ids, mask, strict=True)]
    )


def engines(model: PreTrainedModel, ids: Tensor, mask: Tensor, expected: Tensor) -> list[Engine]:
    """Return engines on both caches, with drafts at random and ones that are always right."""
    script = torch.zeros(len(ids), WHOLE, dtype=torch.long)
    for row, (text, own) in enumerate(zip(ids, mask, strict=True)):
        whole = torch.cat([text[own.bool()], expected[row]])
        script[row, : len(whole)] = whole
    made = []
    for make in (lambda: with_tree(model, tiny_drafter(), 4, 3), lambda: scripted_engine(model, script, 2, 5)):
        made += [make(), paged(make())]
    return made


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", LENGTHS)
def test_each_row_is_what_model_generate_writes_for_it_alone(family, kind):
    model = switching_model(family)
    ids, mask = prompts_of(LENGTHS[kind])
    expected = alone(model, ids, mask)
    for engine in engines(model, ids, mask, expected):
        for speculate in (True, False):
            out = engine.generate(ids, mask, max_new_tokens=NEW, do_sample=False, speculate=speculate)
            assert torch.equal(out[:, -NEW:], expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_across_the_switch_draws_what_plain_decoding_draws(family):
    model = switching_model(family)
    ids, mask = prompts_of(LENGTHS["crossing"] + LENGTHS["mixed"])
    arguments = {"max_new_tokens": NEW, "do_sample": True, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.2}
    plain = with_tree(model, tiny_drafter(), 4, 3).generate(ids, mask, speculate=False, **arguments)
    for engine in (with_tree(model, tiny_drafter(), 4, 3), paged(with_tree(model, tiny_drafter(), 4, 3))):
        assert torch.equal(engine.generate(ids, mask, **arguments), plain)


def test_the_factors_of_these_tests_make_a_difference():
    model = switching_model("llama")
    ids, mask = prompts_of([90])
    before = alone(model, ids, mask)
    model.config.rope_parameters["long_factor"] = model.config.rope_parameters["short_factor"]
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    assert not torch.equal(alone(model, ids, mask), before)


def test_what_a_long_text_left_in_the_paged_cache_is_no_prefix_of_a_short_one():
    model = switching_model("llama")
    engine = paged(with_tree(model, tiny_drafter(), 4, 3))
    ids, mask = prompts_of([90])
    short, seen = ids[:, :40], mask[:, :40]
    arguments = {"max_new_tokens": NEW, "do_sample": False}
    assert torch.equal(engine.generate(ids, mask, **arguments)[:, -NEW:], alone(model, ids, mask))
    for _ in range(2):
        assert torch.equal(engine.generate(short, seen, **arguments)[:, -NEW:], alone(model, short, seen))
    assert torch.equal(engine.generate(ids, mask, **arguments)[:, -NEW:], alone(model, ids, mask))


def test_texts_end_where_the_whole_context_ends():
    model = switching_model("llama")
    engine = with_tree(model, tiny_drafter(), 4, 3)
    ids, _ = prompts_of([WHOLE - 6])
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(engine.generate(ids, max_new_tokens=20, do_sample=False), expected)
    with pytest.raises(ArgumentError, match=f"the target's context is {WHOLE}"):
        engine.generate(torch.cat([ids, ids], dim=1), max_new_tokens=5)


@pytest.mark.parametrize("on", [lambda engine: engine, paged], ids=["dense", "paged"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_cross_the_switch_keep_their_adapters(family, on, tmp_path):
    model = adapted(model=switching_model(family), target_modules=["o_proj"])
    model.save_pretrained(tmp_path)
    engine = on(with_tree(switching_model(family), tiny_drafter(), 4, 3))
    engine.load_adapter("it", tmp_path)
    ids, mask = prompts_of(LENGTHS["crossing"])
    found = engine.generate(ids, mask, adapter=["it", None, None, "it"], max_new_tokens=NEW, do_sample=False)
    expected = alone(model, ids, mask)
    with model.disable_adapter():
        expected[1:3] = alone(model, ids[1:3], mask[1:3])
    assert torch.equal(found[:, -NEW:], expected)


@pytest.mark.parametrize("ahead", [False, True], ids=["read", "ahead"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("limits", [{}, {"max_num_tokens": 40}, {"blocks": 24, "reuse": False}], ids=str)
def test_a_scheduler_serves_rows_that_cross_the_switch(monkeypatch, family, limits, ahead):
    if ahead:
        launch_ahead(monkeypatch)
    model = switching_model(family)
    engine = paged(with_tree(model, tiny_drafter(), 4, 3))
    lengths = [30, AT, 100, 62, 9]
    sequences = [make_sequence([3 + (7 * i + n) % 90 for i in range(n)], 50, GREEDY) for n in lengths]
    served = scheduler(engine, **limits)
    run(served, sequences, 1)
    assert bool(served.preempted) == ("blocks" in limits)
    for sequence in sequences:
        ids = torch.tensor([sequence.prompt])
        expected = model.generate(ids, max_new_tokens=50, do_sample=False)[0, ids.shape[1] :].tolist()
        assert sequence.sink.tokens == expected
