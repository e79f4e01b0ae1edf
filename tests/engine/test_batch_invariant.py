"""Batch-invariant engines in half precision: the same text and the same logits, bit for bit, whatever is beside it."""

import pytest
import torch
from transformers.generation.logits_process import TypicalLogitsWarper

from helpers.models import VOCAB, paged, tiny_drafter, tiny_model, uneven_batch
from helpers.scheduling import KINDS, launch_ahead, make_sequence, random_sequences, run, run_as_alone, scheduler
from redrafter import ArgumentError, DraftTarget, Engine, PromptLookup, ReDrafter, UnsupportedError
from redrafter.app.loading import Pair
from redrafter.app.options import LoadOptions
from redrafter.checkpoints.merged import TreeShape
from redrafter.drafting.proposer import PlainProposer
from redrafter.engine.modes import check_processors, make_batch_invariant
from redrafter.engine.options import EngineOptions
from redrafter.model.target import Target

OPTIONS = EngineOptions(kv_cache_free_gpu_memory_fraction=0.01, max_seq_len=96, batch_invariant=True)
TREES = [(1, 5), (5, 5), (10, 3)]
NEW = 12
SETTINGS = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "temperature": 1.0, "seed": 7}}


def tiny_target(model_type, dtype=torch.bfloat16):
    return Target(tiny_model(model_type).to(dtype))


@pytest.fixture(scope="module", params=["gemma3_text", "qwen3_moe"])
def target(request):
    return tiny_target(request.param)


def engine_of(target, beams=5, depth=5, options=OPTIONS):
    return ReDrafter(target, tiny_drafter().to(target.dtype), TreeShape(beams, depth, 999), options=options)


def write(engine, ids, mask, new=NEW, **arguments):
    """Return the texts `[B, L]` and the logits by step, `[B, new, V]`."""
    out = engine.generate(
        ids, mask, max_new_tokens=new, min_new_tokens=new, return_dict_in_generate=True, output_logits=True, **arguments
    )
    return out.sequences, torch.stack(out.logits, dim=1)


@pytest.mark.parametrize("setting", SETTINGS)
def test_drafts_change_no_bit(target, setting):
    ids, mask = uneven_batch(rows=8)
    text, logits = write(engine_of(target), ids, mask, speculate=False, **SETTINGS[setting])
    for beams, depth in TREES:
        drafted_text, drafted_logits = write(engine_of(target, beams, depth), ids, mask, **SETTINGS[setting])
        assert torch.equal(drafted_text, text)
        assert torch.equal(drafted_logits, logits)


def test_other_rows_change_no_bit(target):
    ids, mask = uneven_batch(rows=8)
    engine = engine_of(target)
    text, logits = write(engine, ids, mask, **SETTINGS["sampled"])
    for row in (0, 3):
        prompt = ids[row : row + 1, mask[row].argmax() :]
        alone = write(engine, prompt, None, do_sample=True, temperature=1.0, seed=7 + row)
        assert torch.equal(alone[0][0, prompt.shape[1] :], text[row, ids.shape[1] :])
        assert torch.equal(alone[1][0], logits[row])


@pytest.mark.parametrize("invariant", [False, True])
def test_only_with_the_mode_drafts_change_no_bit_in_float32(invariant):
    """Guard the tests above: without it, the numbers that they compare differ."""
    ids, mask = uneven_batch(rows=8)
    options = OPTIONS if invariant else EngineOptions()
    engine = engine_of(tiny_target("llama", torch.float32), options=options)
    plain, drafted = (write(engine, ids, mask, 24, speculate=s, do_sample=False)[1] for s in (False, True))
    assert torch.equal(plain, drafted) is invariant


def test_prompts_that_are_read_beside_trees_give_the_same_texts(target, monkeypatch):
    engine, launched = engine_of(target, 3, 4), []
    for ahead in (False, True):
        if ahead:
            launch_ahead(monkeypatch)
        sequences = random_sequences(8, longest=30)
        run(scheduler(engine), sequences, 1)
        launched.append([sequence.sink.tokens for sequence in sequences])
    assert launched[0] == launched[1]


def test_a_draft_model_and_prompt_lookup_write_the_same():
    ids, mask = uneven_batch(rows=3)
    model, small = tiny_model("llama").to(torch.bfloat16), tiny_model("qwen2", num_hidden_layers=1).to(torch.bfloat16)
    engines = [
        DraftTarget(Target(model), Target(small), draft_len=3, num_beams=2, options=OPTIONS),
        DraftTarget.from_pretrained(model, model, batch_invariant=True, max_seq_len=96),
        PromptLookup.from_pretrained(model, batch_invariant=True, max_seq_len=96),
        engine_of(Target(model)),
    ]
    results = [write(engine, ids, mask, **SETTINGS["sampled"]) for engine in engines]
    for text, logits in results:
        assert torch.equal(text, results[0][0])
        assert torch.equal(logits, results[0][1])


def test_a_gpu_needs_the_compiled_forward(monkeypatch):
    bound = tiny_target("llama")
    monkeypatch.setattr(bound, "device", torch.device("cuda"))
    with pytest.raises(ArgumentError, match="leave out compile=False"):
        make_batch_invariant(bound, None, compile=False)


def test_a_model_that_was_compiled_before_is_refused(monkeypatch):
    bound = paged(Engine(tiny_target("llama"), PlainProposer())).target
    monkeypatch.setattr(bound, "device", torch.device("cuda"))
    with pytest.raises(ArgumentError, match="load the model anew"):
        make_batch_invariant(bound, None, compile=True)


def test_a_draft_model_on_another_device_is_refused(monkeypatch):
    draft = Target(tiny_model("qwen2", num_hidden_layers=1))
    monkeypatch.setattr(draft, "device", torch.device("meta"))
    with pytest.raises(UnsupportedError, match="the draft model is on meta"):
        make_batch_invariant(tiny_target("llama"), draft, compile=True)


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_what_is_no_truth_value_is_refused(value):
    with pytest.raises(ArgumentError, match="batch_invariant must be True or False"):
        EngineOptions(batch_invariant=value)


def test_processors_that_sum_by_rows_are_refused_on_a_gpu(monkeypatch):
    engine = engine_of(tiny_target("llama"))
    ids, mask = uneven_batch(rows=1)
    engine.generate(ids, mask, max_new_tokens=2, do_sample=True, typical_p=0.9)
    monkeypatch.setattr(engine.target, "device", torch.device("cuda"))
    with pytest.raises(UnsupportedError, match="typical_p sums in an order that suits the number of rows"):
        check_processors(engine.target, [TypicalLogitsWarper(0.9)])


def test_flags_make_an_engine_batch_invariant():
    options = LoadOptions(batch_invariant=True, tuning="none", max_seq_len=64, kv_cache_free_gpu_memory_fraction=0.01)
    assert Pair.load(options).engine.target.batch_invariant


def test_a_prompt_of_which_most_is_in_the_cache_is_read_beside_a_whole_one():
    target = tiny_target("llama")
    drafter = tiny_drafter(context_window=12, context_head_dim=8).to(target.dtype)
    engine = ReDrafter(target, drafter, TreeShape(3, 3, 999), options=OPTIONS)
    served = scheduler(engine, blocks=40)
    first, second = torch.randint(3, VOCAB, (2, 60), generator=torch.Generator().manual_seed(3)).tolist()
    for prompts in ([first], [first, second]):
        run_as_alone(served, [make_sequence(prompt, 12, KINDS["sampled"]) for prompt in prompts])
