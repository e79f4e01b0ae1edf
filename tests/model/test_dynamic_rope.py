"""Rope whose frequencies change with every token past the first context: each row as if it were alone."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers import PreTrainedModel

from helpers.models import paged, prompts_of, scripted_engine, tiny_drafter, tiny_model, with_tree
from helpers.scheduling import launch_ahead, make_sequence, nothing_is_held, run, scheduler
from redrafter import ArgumentError, Engine
from redrafter.attention.tree_attention import tree_attention
from redrafter.model.target import Target
from redrafter.sampling.params import SamplingParams

FIRST, WHOLE, NEW = 64, 256, 24
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": WHOLE / FIRST}
BY_TYPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": DYNAMIC}
FAMILIES = {"llama": DYNAMIC, "olmo2": DYNAMIC, "cohere": DYNAMIC, "gemma3_text": BY_TYPE}
LENGTHS = {"short": [9, 30], "long": [90, 70], "crossing": [50, 62, FIRST, FIRST - 1], "mixed": [100, 9, 55, FIRST + 1]}
GREEDY = SamplingParams(temperature=0)
WAYS = {"dense": lambda engine: engine, "paged": paged}


def growing_model(family: str) -> PreTrainedModel:
    """Return a tiny model whose rope changes past `FIRST` tokens, and that never ends a text."""
    rope = deepcopy(FAMILIES[family])
    return tiny_model(family, rope_parameters=rope, max_position_embeddings=FIRST, eos_token_id=None)


def alone(model: PreTrainedModel, ids: Tensor, mask: Tensor, count: int = NEW) -> Tensor:
    """Return what `generate` of a fresh model writes for each row without the others."""
    arguments = {"max_new_tokens": count, "do_sample": False}
    rows = zip(ids, mask, strict=True)
    return torch.cat([deepcopy(model).generate(row[None, own.bool()], **arguments)[:, -count:] for row, own in rows])


def served_alone(model: PreTrainedModel, sequence) -> list[int]:
    """Return what `generate` of a fresh model writes behind a sequence's prompt."""
    ids = torch.tensor([list(sequence.prompt)])
    return alone(model, ids, torch.ones_like(ids), sequence.max_new_tokens)[0].tolist()


def engines(model: PreTrainedModel, ids: Tensor, mask: Tensor, expected: Tensor) -> list[Engine]:
    """Return engines with drafts at random and ones that are always right, as trees and as chains."""
    script = torch.zeros(len(ids), WHOLE, dtype=torch.long)
    for row, (text, own) in enumerate(zip(ids, mask, strict=True)):
        whole = torch.cat([text[own.bool()], expected[row]])
        script[row, : len(whole)] = whole
    return [
        with_tree(model, tiny_drafter(), 4, 3),
        with_tree(model, tiny_drafter(), 1, 3),
        scripted_engine(model, script, 2, 5),
        scripted_engine(model, script, 1, 5),
    ]


@pytest.mark.parametrize("on", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", LENGTHS)
def test_each_row_is_what_a_fresh_model_generates_for_it_alone(family, kind, on):
    model = growing_model(family)
    ids, mask = prompts_of(LENGTHS[kind])
    expected = alone(model, ids, mask)
    for engine in engines(model, ids, mask, expected):
        engine = on(engine)
        for speculate in (True, False):
            out = engine.generate(ids, mask, max_new_tokens=NEW, do_sample=False, speculate=speculate)
            assert torch.equal(out[:, -NEW:], expected)


@pytest.mark.parametrize("on", WAYS.values(), ids=WAYS)
def test_sampling_past_the_first_context_draws_what_plain_decoding_draws(on):
    model = growing_model("llama")
    ids, mask = prompts_of(LENGTHS["crossing"] + LENGTHS["mixed"])
    arguments = {"max_new_tokens": NEW, "do_sample": True, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.2}
    plain = with_tree(model, tiny_drafter(), 4, 3).generate(ids, mask, speculate=False, **arguments)
    assert torch.equal(on(with_tree(model, tiny_drafter(), 4, 3)).generate(ids, mask, **arguments), plain)


def test_the_frequencies_of_these_tests_make_a_difference():
    model = growing_model("llama")
    ids, mask = prompts_of([90])
    constant = deepcopy(model)
    constant.model.rotary_emb.rope_type = "default"
    assert not torch.equal(alone(model, ids, mask), alone(constant, ids, mask))


@pytest.mark.parametrize("masked", [False, True], ids=["pieces", "chunks"])
@pytest.mark.parametrize("most", [7, 33, 64, 90])
def test_prompts_that_are_read_in_parts_have_the_frequencies_of_the_whole(monkeypatch, most, masked):
    monkeypatch.setattr("redrafter.model.prompt_reader.MAX_FORWARD_TOKENS", most)
    monkeypatch.setattr("redrafter.model.prompt_reader.MAX_CHUNK_TOKENS", most)
    monkeypatch.setattr("redrafter.model.prompt_reader.MAX_MASK_NUMBERS", 0)
    model = growing_model("llama")
    engine = paged(with_tree(model, tiny_drafter(), 4, 3))
    if masked:
        engine.target.prompt_reader.masks = True
    ids, mask = prompts_of([100, 70, 20])
    out = engine.generate(ids, mask, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(out[:, -NEW:], alone(model, ids, mask))


@pytest.mark.parametrize("max_num_tokens", [16, 50, 8192])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_scheduler_that_reads_on_in_rounds_writes_the_same(monkeypatch, max_num_tokens, ahead):
    if ahead:
        launch_ahead(monkeypatch)
    model = growing_model("llama")
    engine = paged(with_tree(model, tiny_drafter(), 4, 3))
    lengths = [30, 100, 62, 120, 5]
    sequences = [make_sequence([3 + (7 * i + n) % 90 for i in range(n)], 20, GREEDY) for n in lengths]
    served = scheduler(engine, max_num_tokens=max_num_tokens)
    assert served.mixed_prefill == ahead
    run(served, sequences, 1)
    for sequence in sequences:
        assert sequence.sink.tokens == served_alone(model, sequence)


def test_a_preempted_row_gives_each_token_the_frequencies_that_it_had():
    model = growing_model("llama")
    engine = paged(with_tree(model, tiny_drafter(), 4, 3))
    sequences = [make_sequence([3 + (7 * i + n) % 90 for i in range(40 + n)], 60, GREEDY) for n in range(0, 60, 10)]
    served = scheduler(engine, blocks=26, reuse=False)
    run(served, sequences)
    assert served.preempted
    for sequence in sequences:
        assert sequence.sink.tokens == served_alone(model, sequence)
    nothing_is_held(served)


def test_prompts_past_the_first_context_share_blocks_where_they_are_equally_long():
    model = growing_model("llama")
    engine = paged(with_tree(model, tiny_drafter(), 4, 3))
    served = scheduler(engine)
    text = [3 + 7 * i % 90 for i in range(100)]
    reused = []
    for length in (100, 100, 90, 60, 60, 62):
        sequence = make_sequence(text[:length], 12, GREEDY)
        run(served, [sequence])
        assert sequence.sink.tokens == served_alone(model, sequence)
        reused.append(sequence.reused > 0)
    assert reused == [False, True, False, False, True, True]


def test_what_the_model_keeps_of_a_long_text_changes_no_text():
    model = growing_model("llama")
    ids, mask = prompts_of([90])
    expected = alone(model, ids, mask)
    engine = with_tree(model, tiny_drafter(), 4, 3)
    model.generate(torch.cat([ids, ids], dim=1), max_new_tokens=4, do_sample=False)
    assert torch.equal(engine.generate(ids, mask, max_new_tokens=NEW, do_sample=False)[:, -NEW:], expected)


def test_texts_end_where_the_factor_says():
    model = growing_model("llama")
    engine = with_tree(model, tiny_drafter(), 4, 3)
    ids, mask = prompts_of([WHOLE - 6])
    expected = alone(model, ids, mask, 6)
    assert torch.equal(engine.generate(ids, max_new_tokens=20, do_sample=False)[:, -6:], expected)
    with pytest.raises(ArgumentError, match=f"the target's context is {WHOLE}"):
        engine.generate(torch.cat([ids, ids], dim=1), max_new_tokens=5)


def test_rope_that_is_not_understood_ends_texts_where_it_would_change():
    model = growing_model("llama")
    model.model.rotary_emb.mrope_section = [2, 1, 1]
    target = Target(model)
    assert (target.rope, target.context) == (None, FIRST)


def test_one_compiled_forward_gives_all_tokens_their_frequencies(monkeypatch):
    # What stands for the kernels on a CPU cannot be traced, but the reference can.
    monkeypatch.setattr("redrafter.attention.tree_attention._operator", lambda plan, device: tree_attention)
    model, counter = growing_model("llama"), CompileCounter()
    engine = paged(with_tree(model, tiny_drafter(), 4, 3))
    engine.target.prompt_reader.masks = True
    compile = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda run, fullgraph, options: compile(run, fullgraph=fullgraph, backend=counter)
    )
    engine.target.varlen_forward.compile()
    ids, mask = prompts_of([60, 90])
    out = engine.generate(ids, mask, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(out[:, -NEW:], alone(model, ids, mask))
    assert counter.frame_count == 1
