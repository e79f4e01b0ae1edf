"""What a call of `generate` meets beside its text: configs, the model's modes, the context's end."""

import gc
import warnings
from weakref import ref

import pytest
import torch
from transformers import GenerationConfig

from helpers.generation import ON_BOTH_CACHES, letters
from helpers.models import (
    CONTEXT,
    VOCAB,
    engine_with_config,
    scripted_engine,
    tiny_drafter,
    tiny_model,
    uneven_batch,
    with_tree,
)
from redrafter import ArgumentError, DraftTarget, PromptLookup, ReDrafterWarning, UnsupportedError
from redrafter.engine import call
from redrafter.model.target import Target

IDS, MASK = uneven_batch()
GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture
def meta_by_default():
    """Let torch make tensors without data where no device is named, as `set_default_device("cuda")` puts them there."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)  # "cpu" would leave a mode, under which a compiler traces other code


SAMPLED = GREEDY | {"do_sample": True, "seed": 5, "top_p": 0.8, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3}


@pytest.mark.parametrize("arguments", [GREEDY, SAMPLED])
@ON_BOTH_CACHES
def test_the_default_device_of_the_program_changes_no_text(on, arguments, request):
    model, drafter = tiny_model("llama"), tiny_drafter()
    engine = on(with_tree(model, drafter, 3, 3))
    expected = engine.generate(IDS, MASK, **arguments)
    request.getfixturevalue("meta_by_default")
    assert torch.equal(engine.generate(IDS, MASK, **arguments), expected)
    bound_now = with_tree(model, drafter, 3, 3)
    assert torch.equal(bound_now.generate(IDS, MASK, **arguments), expected)


# A generation config of the call


@pytest.fixture
def logged(monkeypatch):
    """Collect what transformers warns of in its log."""
    texts = []
    for name in ("warning", "warning_once"):
        monkeypatch.setattr(f"transformers.generation.utils.logger.{name}", lambda text, *_: texts.append(text))
    return texts


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        ({}, {}),
        ({"repetition_penalty": 1.5}, {}),
        ({"repetition_penalty": 1.5, "eos_token_id": 40, "pad_token_id": 3}, {"repetition_penalty": 1.0}),
        ({"suppress_tokens": list(range(3, 60))}, {"suppress_tokens": None}),
        ({"min_new_tokens": 6, "eos_token_id": list(range(10, 97))}, {}),
        ({"min_new_tokens": 0, "eos_token_id": list(range(10, 50))}, {}),  # no minimum in a shorter row either
        ({"return_dict_in_generate": True, "output_scores": True, "output_logits": True}, {}),
        ({"return_dict_in_generate": True}, {"output_logits": True}),
        ({"return_dict_in_generate": True, "output_scores": True}, {"return_dict_in_generate": False}),
    ],
)
@pytest.mark.parametrize("own", [{}, {"no_repeat_ngram_size": 2, "return_dict_in_generate": True}])
def test_a_generation_config_has_the_place_that_transformers_gives_it(logged, own, config, arguments):
    engine, model = engine_with_config(**own)
    given = GenerationConfig(**GREEDY | config)
    before = given.to_dict()
    expected = model.generate(IDS, attention_mask=MASK, generation_config=given, **arguments)
    theirs = logged.copy()
    logged.clear()
    out = engine.generate(IDS, MASK, generation_config=given, **arguments)
    assert [text for text in logged if "deprecated" in text] == [text for text in theirs if "deprecated" in text]
    assert given.to_dict() == before
    assert isinstance(out, torch.Tensor) == isinstance(expected, torch.Tensor)
    if isinstance(out, torch.Tensor):
        assert torch.equal(out, expected)
        return
    assert torch.equal(out.sequences, expected.sequences)
    assert out.stats.steps > 0
    for name in ("scores", "logits"):
        columns, expected_columns = getattr(out, name), getattr(expected, name)
        assert (columns is None) == (expected_columns is None)
        for column, expected_column in zip(columns or (), expected_columns or (), strict=True):
            row = 0  # whose text goes on to the end
            torch.testing.assert_close(column[row], expected_column[row], atol=1e-4, rtol=1e-4)


def test_stop_strings_of_a_generation_config_warn_of_nothing(logged, llama, engine):
    config = GenerationConfig(stop_strings=["never"], pad_token_id=0, **GREEDY)
    expected = llama.generate(IDS, attention_mask=MASK, generation_config=config, tokenizer=letters())
    logged.clear()
    text = engine.generate(IDS, MASK, generation_config=config, tokenizer=letters())
    assert torch.equal(text, expected)
    assert config.stop_strings == ["never"]
    assert logged == []


# Modes of the model


@pytest.mark.parametrize("speculate", [True, False])
def test_a_model_in_training_mode_is_refused(speculate):
    model = tiny_model("gpt2", attn_pdrop=0.3, resid_pdrop=0.3)
    engine = PromptLookup.from_pretrained(model)
    expected = engine.generate(IDS, MASK, **GREEDY)
    model.train()
    with pytest.raises(ArgumentError, match=r"GPT2LMHeadModel is in training mode, .*call model.eval\(\) first"):
        engine.generate(IDS, MASK, speculate=speculate, **GREEDY)
    with pytest.raises(ArgumentError, match="in training mode"):
        model.generate(IDS, custom_generate=engine.custom_generate(), **GREEDY)
    model.eval()
    assert torch.equal(engine.generate(IDS, MASK, **GREEDY), expected)
    model.transformer.h[1].attn.attn_dropout.train()
    with pytest.raises(ArgumentError, match=r"\(its transformer.h.1.attn.attn_dropout\)"):
        engine.generate(IDS, MASK, **GREEDY)


def test_a_draft_model_in_training_mode_is_refused_where_it_drafts(llama):
    draft = tiny_model("gpt2")
    engine = DraftTarget.from_pretrained(llama, draft)
    draft.train()
    with pytest.raises(ArgumentError, match="GPT2LMHeadModel is in training mode"):
        engine.generate(IDS, MASK, **GREEDY)
    expected = llama.generate(IDS, attention_mask=MASK, **GREEDY)
    assert torch.equal(engine.generate(IDS, MASK, speculate=False, **GREEDY), expected)


@pytest.mark.parametrize("speculate", [True, False])
def test_autocast_is_refused(llama, engine, speculate):
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(UnsupportedError, match=r"under torch.autocast; .*dtype='bfloat16'"):
            engine.generate(IDS, MASK, speculate=speculate, **GREEDY)
        with pytest.raises(UnsupportedError, match=r"under torch.autocast"):
            Target(llama)
        with torch.autocast("cpu", enabled=False):
            text = engine.generate(IDS, MASK, **GREEDY)
    assert torch.equal(text, llama.generate(IDS, attention_mask=MASK, **GREEDY))


# Ends


def test_a_text_that_ends_with_the_context_says_so_once(llama, engine):
    ids = torch.arange(3, VOCAB)[None, :CONTEXT].repeat(3, 1)
    arguments = {"do_sample": False, "eos_token_id": None}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        out = engine.generate(ids, max_new_tokens=40, **arguments)
    assert out.shape[1] == CONTEXT
    [message] = [str(warning.message) for warning in warned if warning.category is ReDrafterWarning]
    assert message.startswith(f"3 of 3 texts ended at the target's context of {CONTEXT} tokens (max_position")
    with pytest.warns(UserWarning, match="the text ended at the target's context"):
        engine.generate(ids[:1], max_new_tokens=40, **arguments)


@pytest.mark.parametrize("end", ["max_new_tokens", "max_length", "eos_token_id"])
def test_a_text_that_ends_of_itself_or_where_it_was_told_to_says_nothing(llama, end):
    ids = torch.arange(3, VOCAB)[None]
    script = llama.generate(ids, max_length=CONTEXT, do_sample=False, eos_token_id=None)
    arguments = {
        "max_new_tokens": {"max_new_tokens": CONTEXT - ids.shape[1], "eos_token_id": None},
        "max_length": {"max_length": CONTEXT, "eos_token_id": None},
        "eos_token_id": {"max_new_tokens": 40, "eos_token_id": script[0, -1].item()},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scripted_engine(llama, script, 1, 2).generate(ids, do_sample=False, **arguments[end])


# The garbage collector


def test_no_full_collection_stops_a_call(llama, monkeypatch):
    monkeypatch.setattr(call, "COLLECT_EVERY", 10)
    engine, rows, collected = with_tree(llama, tiny_drafter(), 2, 1), 128, []

    def note(_, info):
        collected.append(info["generation"])

    class Noting:
        def put_step(self, row, tokens, accepted, ended):
            if note in gc.callbacks and ended:
                gc.callbacks.remove(note)
            elif note not in gc.callbacks and not ended:
                gc.callbacks.append(note)

        def end(self):
            pass

    ids = torch.full((rows, 3), 5)
    engine.generate(ids, torch.ones_like(ids), streamer=Noting(), max_new_tokens=30, min_new_tokens=30, do_sample=False)
    assert set(collected) == {1}, collected
    assert gc.isenabled()


@ON_BOTH_CACHES
def test_an_engine_that_nobody_holds_is_freed_with_its_cache_at_once(on):
    engine = on(with_tree(tiny_model("llama"), tiny_drafter(), 3, 3))
    gc.collect()
    gc.disable()
    try:
        engine.generate(IDS, MASK, **GREEDY)
        parts = [ref(part) for part in (engine, *filter(None, [engine.memory]), *engine.batches.idle)]
        del engine
        assert [part() for part in parts] == [None] * len(parts)
    finally:
        gc.enable()
