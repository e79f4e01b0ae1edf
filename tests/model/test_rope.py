"""Rope whose frequencies follow from the length of a text: each row as if it were alone.

It switches where a text outgrows the first context of its model (`longrope`), or changes with every token past it
(`dynamic`).
"""

import inspect
from copy import deepcopy

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers import Phi3ForCausalLM, PreTrainedModel

from helpers.adapters import adapted
from helpers.generation import ON_BOTH_CACHES
from helpers.models import paged, prompts_of, scripted_engine, tiny_drafter, tiny_model, with_tree
from helpers.scheduling import launch_ahead, make_sequence, nothing_is_held, run, scheduler
from redrafter import ArgumentError, Engine
from redrafter.attention.tree_attention import tree_attention
from redrafter.model.target import Target
from redrafter.sampling.params import SamplingParams

AT, WHOLE, NEW = 64, 256, 24
GREEDY = SamplingParams(temperature=0)
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 4.0, 9.0, 16.0],
    "original_max_position_embeddings": AT,
    "short_mscale": 1.1,
    "long_mscale": 1.3,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": WHOLE / AT}
BY_TYPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": DYNAMIC}
SWITCHING = {"rope_parameters": LONGROPE, "max_position_embeddings": WHOLE}
GROWING = {"rope_parameters": DYNAMIC, "max_position_embeddings": AT}
FAMILIES = {  # family -> what its config says
    "llama": SWITCHING,
    "growing llama": GROWING,
    "olmo2": GROWING,
    "cohere": GROWING,
    "gemma3_text": GROWING | {"rope_parameters": BY_TYPE},
}
# Phi-3 reads a text anew when it crosses; a Llama goes on with the keys that it has. Older versions of transformers
# mean to read it anew, and then read its last token alone.
if "next_sequence_length" in inspect.getsource(Phi3ForCausalLM.prepare_inputs_for_generation):
    FAMILIES["phi3"] = SWITCHING | {"original_max_position_embeddings": AT}
    FAMILIES["phimoe"] = FAMILIES["phi3"] | {"num_local_experts": 4, "num_experts_per_tok": 2}
CROSSING = [family for family in FAMILIES if family in ("llama", "phi3", "phimoe", "growing llama")]
LENGTHS = {"short": [9, 30], "long": [90, 70], "crossing": [50, 62, AT, AT - 1], "mixed": [100, 9, 55, AT + 1]}


def model_of(family: str) -> PreTrainedModel:
    """Return a tiny model whose rope changes past `AT` tokens, and that never ends a text."""
    return tiny_model(family.split()[-1], **deepcopy(FAMILIES[family]), eos_token_id=None)


def alone(model: PreTrainedModel, ids: Tensor, mask: Tensor, count: int = NEW) -> Tensor:
    """Return what `generate` of a fresh model writes for each row without the others."""
    arguments = {"max_new_tokens": count, "do_sample": False}
    rows = zip(ids, mask, strict=True)
    return torch.cat([deepcopy(model).generate(row[None, own.bool()], **arguments)[:, -count:] for row, own in rows])


def drafting(family: str, beams: int = 4) -> Engine:
    return with_tree(model_of(family), tiny_drafter(), beams, 3)


def served_as_alone(served, sequences, apart: int = 0) -> None:
    """Run sequences, and fail unless each is what `generate` of a fresh model writes after its prompt."""
    run(served, sequences, apart)
    for sequence in sequences:
        ids = torch.tensor([list(sequence.request.prompt)])
        expected = alone(served.engine.model, ids, torch.ones_like(ids), sequence.request.max_new_tokens)[0]
        assert sequence.sink.tokens == expected.tolist()


def sequences_of(lengths: list[int], count: int) -> list:
    return [make_sequence([3 + (7 * i + n) % 90 for i in range(n)], count, GREEDY) for n in lengths]


@ON_BOTH_CACHES
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", LENGTHS)
def test_each_row_is_what_a_fresh_model_generates_for_it_alone(family, kind, on):
    """Drafts are at random, and always right."""
    model = model_of(family)
    ids, mask = prompts_of(LENGTHS[kind])
    expected = alone(model, ids, mask)
    script = torch.zeros(len(ids), WHOLE, dtype=torch.long)
    for row, (text, own) in enumerate(zip(ids, mask, strict=True)):
        whole = torch.cat([text[own.bool()], expected[row]])
        script[row, : len(whole)] = whole
    engines = [with_tree(model, tiny_drafter(), 4, 3), scripted_engine(model, script, 2, 5)]
    if family in ("llama", "growing llama"):
        engines += [with_tree(model, tiny_drafter(), 1, 3), scripted_engine(model, script, 1, 5)]
    for engine in map(on, engines):
        for speculate in (True, False):
            out = engine.generate(ids, mask, max_new_tokens=NEW, do_sample=False, speculate=speculate)
            assert torch.equal(out[:, -NEW:], expected)


@pytest.mark.parametrize("family", CROSSING)
def test_sampling_across_the_first_context_draws_what_plain_decoding_draws(family):
    ids, mask = prompts_of(LENGTHS["crossing"] + LENGTHS["mixed"])
    arguments = {"max_new_tokens": NEW, "do_sample": True, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.2}
    engine = drafting(family)
    plain = engine.generate(ids, mask, speculate=False, **arguments)
    for each in (engine, paged(drafting(family))):
        assert torch.equal(each.generate(ids, mask, **arguments), plain)


@pytest.mark.parametrize("masked", [False, True], ids=["pieces", "chunks"])
@pytest.mark.parametrize("most", [7, 33, 64, 90])
def test_prompts_that_are_read_in_parts_have_the_frequencies_of_the_whole(monkeypatch, most, masked):
    for name, value in {"FORWARD_TOKENS": most, "CHUNK_TOKENS": most, "MASK_NUMBERS": 0}.items():
        monkeypatch.setattr(f"redrafter.model.prompt_reader.MAX_{name}", value)
    engine = paged(drafting("growing llama"))
    engine.target.prompt_reader.masks |= masked
    ids, mask = prompts_of([100, 70, 20])
    out = engine.generate(ids, mask, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(out[:, -NEW:], alone(engine.model, ids, mask))


@ON_BOTH_CACHES
@pytest.mark.parametrize("family", [family for family in CROSSING if family != "growing llama"])
def test_rows_that_cross_the_switch_keep_their_adapters(family, on, tmp_path):
    model = adapted(model=model_of(family), target_modules=["o_proj"])
    model.save_pretrained(tmp_path)
    engine = on(drafting(family))
    engine.load_adapter("it", tmp_path)
    ids, mask = prompts_of(LENGTHS["crossing"])
    found = engine.generate(ids, mask, adapter=["it", None, None, "it"], max_new_tokens=NEW, do_sample=False)
    expected = alone(model, ids, mask)
    with model.disable_adapter():
        expected[1:3] = alone(model, ids[1:3], mask[1:3])
    assert torch.equal(found[:, -NEW:], expected)


@pytest.mark.parametrize("ahead", [False, True], ids=["read", "ahead"])
@pytest.mark.parametrize("family", CROSSING)
@pytest.mark.parametrize("limits", [{}, {"max_num_tokens": 16}, {"max_num_tokens": 40}, {"blocks": 24}], ids=str)
def test_a_scheduler_serves_rows_that_cross_the_first_context(monkeypatch, family, limits, ahead):
    if ahead:
        launch_ahead(monkeypatch)
    served = scheduler(paged(drafting(family)), reuse="blocks" not in limits, **limits)
    served_as_alone(served, sequences_of([30, AT, 100, 62, 9], 50), apart=1)
    assert bool(served.running_set.preempted) == ("blocks" in limits)
    nothing_is_held(served)


@pytest.mark.parametrize("family", ["llama", "growing llama"])
def test_prompts_past_the_first_context_share_blocks_where_their_keys_are_the_same(family):
    """Those of `dynamic` are so where prompts are equally long, those of `longrope` where all are long or short."""
    served = scheduler(paged(drafting(family)))
    text, reused = [3 + 7 * i % 90 for i in range(100)], []
    for length in (100, 100, 90, 60, 60, 62):
        sequence = make_sequence(text[:length], 12, GREEDY)
        served_as_alone(served, [sequence])
        reused.append(sequence.reused > 0)
    assert reused == [False, True, family == "llama", False, True, True]


def test_what_the_model_keeps_of_a_long_text_changes_no_text():
    engine = drafting("growing llama")
    ids, mask = prompts_of([90])
    expected = alone(engine.model, ids, mask)
    engine.model.generate(torch.cat([ids, ids], dim=1), max_new_tokens=4, do_sample=False)
    assert torch.equal(engine.generate(ids, mask, max_new_tokens=NEW, do_sample=False)[:, -NEW:], expected)


@pytest.mark.parametrize("family", ["llama", "growing llama"])
def test_texts_end_where_the_whole_context_ends(family):
    engine = drafting(family)
    ids, mask = prompts_of([WHOLE - 6])
    expected = alone(engine.model, ids, mask, 6)
    assert torch.equal(engine.generate(ids, max_new_tokens=20, do_sample=False)[:, -6:], expected)
    with pytest.raises(ArgumentError, match=f"a prompt may have {WHOLE - 1}"):
        engine.generate(torch.cat([ids, ids], dim=1), max_new_tokens=5)


def test_rope_that_is_not_understood_ends_texts_where_it_would_change():
    model = model_of("growing llama")
    model.model.rotary_emb.mrope_section = [2, 1, 1]
    target = Target(model)
    assert (target.rope, target.context) == (None, AT)


@pytest.mark.variant  # compiles a model
def test_one_compiled_forward_gives_all_tokens_their_frequencies(monkeypatch):
    # What stands for the kernels on a CPU cannot be traced, but the reference can.
    monkeypatch.setattr("redrafter.attention.tree_attention._operator", lambda plan, device: tree_attention)
    engine, counter, compile = paged(drafting("growing llama")), CompileCounter(), torch.compile
    engine.target.prompt_reader.masks = True
    monkeypatch.setattr(
        torch, "compile", lambda run, fullgraph, backend: compile(run, fullgraph=fullgraph, backend=counter)
    )
    engine.target.varlen_forward.compile()
    ids, mask = prompts_of([60, 90])
    out = engine.generate(ids, mask, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(out[:, -NEW:], alone(engine.model, ids, mask))
    assert counter.frame_count == 1
