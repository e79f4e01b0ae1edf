"""Arguments that are read before transformers prepares a call: wrappers' habits, the prompt's names, stop strings."""

import pytest
import torch
from transformers import GenerationConfig

from helpers.generation import letters
from helpers.models import engine_with_config, tiny_model, uneven_batch
from redrafter import ArgumentError, UnsupportedError

IDS, MASK = uneven_batch()
GREEDY = {"max_new_tokens": 12, "do_sample": False}


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
@pytest.mark.parametrize("speculate", [True, False])
def test_what_wrappers_pass_on_by_habit_changes_nothing(llama, engine, speculate, habit):
    expected = llama.generate(IDS, attention_mask=MASK, **GREEDY)
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


@pytest.mark.parametrize("nothing", [{}, {"inputs": None}, {"input_ids": None}])
def test_a_call_without_a_prompt_is_refused(engine, nothing):
    with pytest.raises(ArgumentError, match="there is no prompt: pass input_ids"):
        engine.generate(**nothing, **GREEDY)


def test_stop_strings_of_the_checkpoint_need_no_more_than_the_tokenizer():
    tokenizer, plain = letters(), tiny_model("llama").generate(IDS[:1], max_new_tokens=30, do_sample=False)
    stop = tokenizer.decode(plain[0, IDS.shape[1] + 8 : IDS.shape[1] + 10])
    engine, model = engine_with_config(stop_strings=[stop])
    arguments = {"max_new_tokens": 30, "do_sample": False}
    expected = model.generate(IDS[:1], tokenizer=tokenizer, **arguments)
    assert expected.shape[1] < plain.shape[1]
    assert torch.equal(engine.generate(IDS[:1], tokenizer=tokenizer, **arguments), expected)
    config = GenerationConfig(**arguments)
    assert torch.equal(engine.generate(IDS[:1], generation_config=config, tokenizer=tokenizer), expected)
    assert torch.equal(engine.generate(IDS[:1], stop_strings=None, **arguments), plain)
    with pytest.raises(ArgumentError, match="stop_strings needs the tokenizer"):
        engine.generate(IDS[:1], **arguments)


def test_stop_strings_without_a_tokenizer_are_refused(engine):
    with pytest.raises(ArgumentError, match="stop_strings needs the tokenizer"):
        engine.generate(IDS, MASK, stop_strings=["x"])
