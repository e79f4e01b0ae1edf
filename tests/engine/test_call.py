"""What a call of `generate` meets beside its text: wrappers' habits, configs, the model's modes, the context's end."""

import warnings

import pytest
import torch
from transformers import GenerationConfig

from helpers.generation import letters
from helpers.models import CONTEXT, VOCAB, scripted_engine, tiny_drafter, tiny_model, uneven_batch, with_tree
from redrafter import ArgumentError, DraftTarget, PromptLookup, UnsupportedError
from redrafter.target.target import Target

IDS, MASK = uneven_batch()
GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def engine(llama):
    return with_tree(llama, tiny_drafter(), 3, 3)


def with_config(**settings):
    """Return an engine of a fresh model whose checkpoint's generation config says this, and the model."""
    model = tiny_model("llama")
    model.generation_config.update(**settings)
    return with_tree(model, tiny_drafter(), 3, 3), model


# Names


@pytest.mark.parametrize(
    "habit",
    [
        {"past_key_values": None, "position_ids": None, "inputs_embeds": None, "cache_position": None},
        {"assistant_model": None, "assistant_tokenizer": None, "negative_prompt_ids": None},
        {"negative_prompt_attention_mask": None, "token_type_ids": None, "inputs": None, "custom_generate": None},
        {"synced_gpus": None, "trust_remote_code": None, "logits_to_keep": None},
        {"synced_gpus": False, "trust_remote_code": False, "logits_to_keep": 0},
        {"trust_remote_code": True, "logits_to_keep": 1, "use_cache": True},
        {"use_cache": False},
    ],
)
def test_what_wrappers_pass_on_by_habit_changes_nothing(llama, engine, habit):
    expected = llama.generate(IDS, attention_mask=MASK, **GREEDY)
    for speculate in (True, False):
        assert torch.equal(engine.generate(IDS, MASK, speculate=speculate, **GREEDY, **habit), expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("past_key_values", object()),
        ("position_ids", IDS),
        ("inputs_embeds", torch.zeros(1)),
        ("token_type_ids", torch.zeros(4, 11)),
        ("assistant_model", object()),
        ("negative_prompt_ids", IDS),
        ("synced_gpus", True),
        ("custom_generate", "a/repo"),
        ("logits_to_keep", 5),
        ("logits_to_keep", torch.tensor([1])),
        ("trust_remote_code", "yes"),
    ],
)
def test_what_asks_for_something_is_refused_by_name(engine, name, value):
    with pytest.raises(UnsupportedError, match=rf"generate\(\) does not take {name}; "):
        engine.generate(IDS, MASK, **GREEDY, **{name: value})


def test_inputs_is_another_name_of_the_prompt(llama, engine):
    expected = llama.generate(inputs=IDS, attention_mask=MASK, **GREEDY)
    assert torch.equal(engine.generate(inputs=IDS, attention_mask=MASK, **GREEDY), expected)
    with pytest.raises(ArgumentError, match="inputs is another name of input_ids"):
        engine.generate(IDS, inputs=IDS, **GREEDY)
    for nothing in ({}, {"inputs": None}, {"input_ids": None}):
        with pytest.raises(ArgumentError, match="there is no prompt: pass input_ids"):
            engine.generate(**nothing, **GREEDY)


# The checkpoint's generation config


@pytest.mark.parametrize("settings", [{"use_cache": False}, {"cache_implementation": "static"}])
def test_a_cache_that_only_the_checkpoint_asks_for_refuses_no_call(settings):
    engine, model = with_config(**settings)
    expected = model.generate(IDS, attention_mask=MASK, **GREEDY, use_cache=True, cache_implementation=None)
    assert torch.equal(engine.generate(IDS, MASK, **GREEDY), expected)
    adapted = model.generate(IDS, attention_mask=MASK, custom_generate=engine.custom_generate(), **GREEDY)
    assert torch.equal(adapted, expected)


def test_a_cache_that_changes_tokens_and_one_that_the_call_asks_for_are_refused():
    engine, _ = with_config(cache_implementation="static")
    with pytest.raises(UnsupportedError, match="cache_implementation='static'"):
        engine.generate(IDS, MASK, cache_implementation="static", **GREEDY)
    config = GenerationConfig(cache_implementation="offloaded", **GREEDY)
    with pytest.raises(UnsupportedError, match="cache_implementation='offloaded'"):
        engine.generate(IDS, MASK, generation_config=config)


def test_stop_strings_of_the_checkpoint_need_no_more_than_the_tokenizer():
    tokenizer, plain = letters(), tiny_model("llama").generate(IDS[:1], max_new_tokens=30, do_sample=False)
    stop = tokenizer.decode(plain[0, IDS.shape[1] + 8 : IDS.shape[1] + 10])
    engine, model = with_config(stop_strings=[stop])
    arguments = {"max_new_tokens": 30, "do_sample": False}
    expected = model.generate(IDS[:1], tokenizer=tokenizer, **arguments)
    assert expected.shape[1] < plain.shape[1]
    assert torch.equal(engine.generate(IDS[:1], tokenizer=tokenizer, **arguments), expected)
    config = GenerationConfig(**arguments)
    assert torch.equal(engine.generate(IDS[:1], generation_config=config, tokenizer=tokenizer), expected)
    assert torch.equal(engine.generate(IDS[:1], stop_strings=None, **arguments), plain)
    with pytest.raises(ArgumentError, match="stop_strings needs the tokenizer"):
        engine.generate(IDS[:1], **arguments)


# A generation config of the call


@pytest.fixture
def logged(monkeypatch):
    """Collect what transformers warns of in its log."""
    found = []
    for name in ("warning", "warning_once"):
        monkeypatch.setattr(f"transformers.generation.utils.logger.{name}", lambda text, *_: found.append(text))
    return found


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        ({}, {}),
        ({"repetition_penalty": 1.5}, {}),
        ({"repetition_penalty": 1.5, "eos_token_id": 40, "pad_token_id": 3}, {"repetition_penalty": 1.0}),
        ({"suppress_tokens": list(range(3, 60))}, {"suppress_tokens": None}),
        ({"min_new_tokens": 6, "eos_token_id": list(range(10, 97))}, {}),
        ({"return_dict_in_generate": True, "output_scores": True, "output_logits": True}, {}),
        ({"return_dict_in_generate": True}, {"output_logits": True}),
        ({"return_dict_in_generate": True, "output_scores": True}, {"return_dict_in_generate": False}),
    ],
)
@pytest.mark.parametrize("own", [{}, {"no_repeat_ngram_size": 2, "return_dict_in_generate": True}])
def test_a_generation_config_has_the_place_that_transformers_gives_it(logged, own, config, arguments):
    engine, model = with_config(**own)
    given = GenerationConfig(**GREEDY | config)
    before = given.to_dict()
    expected = model.generate(IDS, attention_mask=MASK, generation_config=given, **arguments)
    theirs = logged.copy()
    logged.clear()
    found = engine.generate(IDS, MASK, generation_config=given, **arguments)
    assert [text for text in logged if "deprecated" in text] == [text for text in theirs if "deprecated" in text]
    assert given.to_dict() == before
    assert isinstance(found, torch.Tensor) == isinstance(expected, torch.Tensor)
    if isinstance(found, torch.Tensor):
        assert torch.equal(found, expected)
        return
    assert torch.equal(found.sequences, expected.sequences)
    assert found.stats.steps > 0
    for name in ("scores", "logits"):
        mine, others = getattr(found, name), getattr(expected, name)
        assert (mine is None) == (others is None)
        for ours, told in zip(mine or (), others or (), strict=True):
            row = 0  # whose text goes on to the end
            torch.testing.assert_close(ours[row], told[row], atol=1e-4, rtol=1e-4)


def test_stop_strings_of_a_generation_config_warn_of_nothing(logged, llama, engine):
    config = GenerationConfig(stop_strings=["never"], pad_token_id=0, **GREEDY)
    expected = llama.generate(IDS, attention_mask=MASK, generation_config=config, tokenizer=letters())
    logged.clear()
    found = engine.generate(IDS, MASK, generation_config=config, tokenizer=letters())
    assert torch.equal(found, expected)
    assert config.stop_strings == ["never"]
    assert logged == []


def test_what_is_no_generation_config_is_named(engine):
    with pytest.raises(ArgumentError, match="generation_config must be a GenerationConfig, got dict"):
        engine.generate(IDS, generation_config={"max_new_tokens": 5})


# Modes of the model


def test_a_model_in_training_mode_is_refused():
    model = tiny_model("gpt2", attn_pdrop=0.3, resid_pdrop=0.3)
    engine = PromptLookup.from_pretrained(model)
    expected = engine.generate(IDS, MASK, **GREEDY)
    model.train()
    for speculate in (True, False):
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


def test_autocast_is_refused(llama, engine):
    with torch.autocast("cpu", torch.bfloat16):
        for speculate in (True, False):
            with pytest.raises(UnsupportedError, match=r"under torch.autocast; .*dtype='bfloat16'"):
                engine.generate(IDS, MASK, speculate=speculate, **GREEDY)
        with pytest.raises(UnsupportedError, match=r"under torch.autocast"):
            Target(llama)
        with torch.autocast("cpu", enabled=False):
            found = engine.generate(IDS, MASK, **GREEDY)
    assert torch.equal(found, llama.generate(IDS, attention_mask=MASK, **GREEDY))


# Ends


@pytest.mark.parametrize("ends", [[70, 12], [12, 70], [12]])
@pytest.mark.parametrize("pad", [None, 5])
def test_rows_that_ended_are_padded_as_transformers_pads_them(ends, pad):
    model = tiny_model("llama")
    model.generation_config.pad_token_id = None
    plain = model.generate(IDS, attention_mask=MASK, max_new_tokens=20, do_sample=False, eos_token_id=None)
    early = [token for token in plain[1, IDS.shape[1] :].tolist() if token not in plain[0, IDS.shape[1] :]]
    ends = [early[0] if end == 12 else end for end in ends]
    arguments = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": ends, "pad_token_id": pad}
    expected = model.generate(IDS, attention_mask=MASK, **arguments)
    found = with_tree(model, tiny_drafter(), 3, 3).generate(IDS, MASK, **arguments)
    assert torch.equal(found, expected)
    assert expected[1, -1] == (ends[0] if pad is None else pad)


def test_a_text_that_ends_with_the_context_says_so_once(llama, engine):
    ids = torch.arange(3, VOCAB)[None, :CONTEXT].repeat(3, 1)
    arguments = {"do_sample": False, "eos_token_id": None}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        out = engine.generate(ids, max_new_tokens=40, **arguments)
    assert out.shape[1] == CONTEXT
    [message] = [str(each.message) for each in found if each.filename.startswith(engine_folder())]
    assert message.startswith(f"3 of 3 texts ended at the target's context of {CONTEXT} tokens")
    with pytest.warns(UserWarning, match="the text ended at the target's context"):
        engine.generate(ids[:1], max_new_tokens=40, **arguments)


def engine_folder() -> str:
    import redrafter

    return str(redrafter.__path__[0])


def test_a_text_that_ends_of_itself_or_where_it_was_told_to_says_nothing(llama):
    ids = torch.arange(3, VOCAB)[None]
    left = CONTEXT - ids.shape[1]
    script = llama.generate(ids, max_length=CONTEXT, do_sample=False, eos_token_id=None)
    engine = scripted_engine(llama, script, 1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for arguments in (
            {"max_new_tokens": left, "eos_token_id": None},
            {"max_length": CONTEXT, "eos_token_id": None},
            {"max_new_tokens": 40, "eos_token_id": script[0, -1].item()},
        ):
            engine.generate(ids, do_sample=False, **arguments)
