"""Arguments and prompts of `generate`: those that are honoured, those without effect, and those that are refused."""

import pytest
import torch
from transformers import CompileConfig, GenerationConfig

from helpers.generation import letters, same_as_model
from helpers.models import CONTEXT, VOCAB, engine_with_config, tiny_drafter, tiny_model, uneven_batch, with_tree
from redrafter import ArgumentError, UnsupportedError
from redrafter.engine.arguments import _NOT_OURS, _REFUSED

IDS, MASK = uneven_batch()
GREEDY = {"max_new_tokens": 12, "do_sample": False}
PROMPT = {"input_ids": IDS, "attention_mask": MASK}


def ids(*tokens: float) -> dict:
    return {"input_ids": torch.tensor([tokens]), "attention_mask": None}


WRONG = [  # besides a prompt, or in its place
    ({"forced_eos_token_id": [5, VOCAB]}, f"forced_eos_token_id names token {VOCAB}, but the vocabulary has {VOCAB}"),
    ({"forced_bos_token_id": VOCAB}, f"forced_bos_token_id names token {VOCAB}"),
    ({"logit_bias": {5: "x"}}, "logit_bias is a dict"),
    ({"logit_bias": {5: float("nan")}}, "logit_bias is a dict"),
    ({"logit_bias": {True: 1.0}}, "logit_bias is a dict"),
    ({"logit_bias": {5: 1.0}, "sequence_bias": [7]}, "sequence_bias"),
    ({"generation_config": GenerationConfig(sequence_bias=[7])}, "generation_config has a value of a wrong type"),
    ({"exponential_decay_length_penalty": (3,)}, "exponential_decay_length_penalty, generation_config has a value of"),
    ({"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": None}, "exponential_decay.* needs an end token"),
    ({"bad_words_ids": [[]]}, "bad_words_ids or sequence_bias has a list without tokens"),
    ({"max_time": "a"}, "max_time is a number of seconds, got 'a'"),
    ({"input_ids": IDS.to_sparse(), "attention_mask": None}, "one of input_ids"),
    ({"max_new_token": 5}, "max_new_tokens"),
    ({"max_new_tokens": 0}, "max_new_tokens"),
    ({"num_return_sequences": 2, "do_sample": False}, "num_return_sequences"),
    ({"num_return_sequences": 0}, "num_return_sequences"),
    ({"input_ids": torch.zeros(1, 0, dtype=torch.long), "attention_mask": None}, "prompt is empty"),
    ({"input_ids": torch.zeros(0, 3, dtype=torch.long), "attention_mask": None}, "prompt is empty"),
    ({"input_ids": torch.tensor([5, 6]), "attention_mask": None}, r"\[batch, length\]"),
    ({"input_ids": [[5, 6]], "attention_mask": None}, "list"),
    (ids(0.5), "integer"),
    (ids(5, VOCAB), f"token id {VOCAB} is out of range"),
    (ids(5, -1), "token id -1"),
    (ids(*[5] * CONTEXT), f"{CONTEXT} tokens; a prompt may have {CONTEXT - 1}, and with its answer {CONTEXT}"),
    ({"attention_mask": MASK[:, 1:]}, "shape of input_ids"),
    ({"attention_mask": MASK[:2]}, "shape of input_ids"),
    ({"attention_mask": MASK.flip(1)}, "left-padded"),
    ({"attention_mask": MASK * 0}, "no token"),
    ({"inputs": IDS}, "inputs is another name of input_ids"),
    ({"input_ids": None}, "there is no prompt: pass input_ids"),
    ({"input_ids": None, "inputs": None}, "there is no prompt: pass input_ids"),
    ({"stop_strings": ["x"]}, "stop_strings needs the tokenizer"),
    ({"generation_config": {"max_new_tokens": 5}}, "generation_config must be a GenerationConfig, got dict"),
    ({"temperature": -1.0, "do_sample": True}, "temperature"),
    ({"temperature": [1.0, 2.0], "do_sample": True}, "one per output row"),
    ({"temperature": [1.0, 1.0, 0.0, 1.0], "do_sample": True}, "must be positive"),
    ({"temperature": [1.0, None, 1.0, 1.0], "do_sample": True}, "must be positive"),
    ({"temperature": [1.0, "x", 1.0, 1.0], "do_sample": True}, "must be positive"),
    ({"temperature": [0.5] * 4, "do_sample": False}, "is for sampling"),
    ({"seed": [1, 2], "do_sample": True}, "2 entries for 4 output rows"),
    ({"seed": "a", "do_sample": True}, "a seed is an int"),
    ({"seed": -1, "do_sample": True}, "a seed is an int"),
    *(({"streamer": x}, "streamer is an object with the methods put and end") for x in ("x", print, 3)),
]
UNSUPPORTED = [
    ({"num_beams": 4}, "num_beams=4"),
    ({"num_assistant_tokens": 5}, "num_assistant_tokens=5 .* argument of from_pretrained"),
    *(
        ({name: value}, name)
        for name, value in {
            "guidance_scale": 2.0,
            "penalty_alpha": 0.6,
            "dola_layers": "low",
            "prompt_lookup_num_tokens": 3,
            "output_hidden_states": True,
            "output_attentions": True,
            "cache_implementation": "static",
            "encoder_repetition_penalty": 1.2,
            "max_matching_ngram_size": 3,
            "prefill_chunk_size": 64,
        }.items()
    ),
    *(
        ({name: value}, rf"generate\(\) does not take {name}; ")
        for name, value in (
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
        )
    ),
]


@pytest.mark.parametrize(
    ("arguments", "named", "error"),
    [(*case, ArgumentError) for case in WRONG] + [(*case, UnsupportedError) for case in UNSUPPORTED],
)
def test_what_cannot_be_honoured_is_refused_by_name(engine, arguments, named, error):
    with pytest.raises(error, match=named):
        engine.generate(**PROMPT | GREEDY | arguments)


def test_biases_of_tokens_add_to_sequence_bias_in_both_forms_of_transformers(engine):
    expected = engine.generate(**PROMPT | GREEDY, sequence_bias={(60,): 50.0, (60, 61): 3.0})
    for form in ({(60,): 20.0, (60, 61): 3.0}, [[[60], 20.0], [[60, 61], 3.0]]):
        assert torch.equal(engine.generate(**PROMPT | GREEDY, sequence_bias=form, logit_bias={60: 30}), expected)
    assert (expected[:, PROMPT["input_ids"].shape[1] :] == 60).any()


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
    expected = llama.generate(**PROMPT, **GREEDY)
    for speculate in (True, False):
        assert torch.equal(engine.generate(**PROMPT, speculate=speculate, **GREEDY, **habit), expected)


def test_a_prompt_may_have_its_other_name_and_ids_of_either_width(llama, engine):
    expected = llama.generate(**PROMPT, **GREEDY)
    assert torch.equal(engine.generate(inputs=IDS, attention_mask=MASK, **GREEDY), expected)
    assert torch.equal(engine.generate(IDS.int(), MASK.bool(), **GREEDY), expected)


def test_a_prompt_one_short_of_the_context_writes_one_token(engine):
    assert engine.generate(torch.full((1, CONTEXT - 1), 5), max_length=CONTEXT, do_sample=False).shape[1] == CONTEXT


@pytest.mark.parametrize("many", [(1 << 63) - 1, 1 << 70])
def test_the_context_ends_a_text_that_may_be_longer_than_any_number_of_the_machine(engine, many):
    texts = [engine.generate(IDS, MASK, do_sample=False, eos_token_id=None, max_new_tokens=x) for x in (many, CONTEXT)]
    assert torch.equal(*texts)


@pytest.mark.parametrize("ends", [[70, 12], [12, 70], [12]])
@pytest.mark.parametrize("pad", [None, 5])
def test_rows_that_ended_are_padded_as_transformers_pads_them(ends, pad):
    model = tiny_model("llama")
    model.generation_config.pad_token_id = None
    plain = model.generate(IDS, attention_mask=MASK, max_new_tokens=20, do_sample=False, eos_token_id=None)
    early = [token for token in plain[1, IDS.shape[1] :].tolist() if token not in plain[0, IDS.shape[1] :]]
    ends = [early[0] if end == 12 else end for end in ends]
    engine = with_tree(model, tiny_drafter(), 3, 3)
    text = same_as_model(engine, IDS, MASK, max_new_tokens=20, eos_token_id=ends, pad_token_id=pad)
    assert text[1, -1] == (ends[0] if pad is None else pad)


@pytest.mark.parametrize("temperature", [1e-37, 1e-39, 1e-45, 1e-60])
def test_a_temperature_near_0_takes_the_likeliest_token(engine, temperature):
    greedy = engine.generate(IDS, MASK, do_sample=False, max_new_tokens=8)
    for given in (temperature, [temperature] * len(IDS)):
        assert torch.equal(engine.generate(IDS, MASK, temperature=given, do_sample=True, max_new_tokens=8), greedy)


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


@pytest.mark.parametrize(
    "settings", [{"use_cache": False}, {"cache_implementation": "static"}, {"num_assistant_tokens": 7}]
)
def test_a_setting_that_only_the_checkpoint_asks_for_refuses_no_call(settings):
    engine, model = engine_with_config(**settings)
    expected = model.generate(**PROMPT, **GREEDY, use_cache=True, cache_implementation=None)
    assert torch.equal(engine.generate(**PROMPT, **GREEDY), expected)
    assert torch.equal(model.generate(**PROMPT, custom_generate=engine.custom_generate(), **GREEDY), expected)


def test_a_cache_that_the_call_asks_for_is_refused_though_it_is_the_checkpoints():
    engine, _ = engine_with_config(cache_implementation="static")
    with pytest.raises(UnsupportedError, match="cache_implementation='static'"):
        engine.generate(**PROMPT, cache_implementation="static", **GREEDY)


def test_a_cache_that_a_config_asks_for_is_refused_before_transformers_makes_it(engine, monkeypatch):
    def stream_without_a_driver():
        raise RuntimeError("CUDA driver version is insufficient")  # as from torch for CUDA on a machine that has none

    monkeypatch.setattr(torch, "Stream", stream_without_a_driver)
    config = GenerationConfig(cache_implementation="offloaded", **GREEDY)
    with pytest.raises(UnsupportedError, match="cache_implementation='offloaded'"):
        engine.generate(**PROMPT, generation_config=config)


def test_transformers_makes_no_cache_for_a_call(engine, monkeypatch):
    expected = engine.model.generate(**PROMPT, **GREEDY)

    def refuse(*_, **__):
        raise AssertionError("a cache that nobody reads")

    monkeypatch.setattr("transformers.generation.utils.DynamicCache", refuse)
    config = GenerationConfig(**GREEDY)
    for arguments in (GREEDY, {"generation_config": config}, {"use_cache": True, **GREEDY}):
        assert torch.equal(engine.generate(**PROMPT, **arguments), expected)
    assert config.use_cache is None


# Every field of a GenerationConfig is honoured, refused by name, or without effect. Here are calls that a field
# changes: greedy, or so narrow that sampling has no choice, so that `model.generate` writes the same.
UNPADDED = torch.arange(24).view(3, 8) + 5
SAMPLED = {"do_sample": True, "top_k": 0}
HONOURED: dict[str, dict] = {
    "max_length": {"max_length": 13, "max_new_tokens": None},
    "max_new_tokens": {"max_new_tokens": 2.5},  # as numbers from a division are
    "min_length": {"min_length": 12, "eos_token_id": list(range(2, 60))},
    "min_new_tokens": {"min_new_tokens": 4, "eos_token_id": list(range(2, 60))},
    "max_time": {"max_time": 1e-9},
    "do_sample": SAMPLED | {"typical_p": 1e-6},
    "temperature": SAMPLED | {"temperature": 1e-5, "repetition_penalty": 1.5},
    "top_k": SAMPLED | {"top_k": 1},
    "top_p": SAMPLED | {"top_p": 1e-6},
    "min_p": SAMPLED | {"min_p": 1.0},
    "top_h": SAMPLED | {"top_h": 1e-6},
    "typical_p": SAMPLED | {"typical_p": 1e-6},
    "epsilon_cutoff": SAMPLED | {"epsilon_cutoff": 0.999},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[token] for token in range(3, 50)]},
    "sequence_bias": {"sequence_bias": {(60,): 50.0}},
    "suppress_tokens": {"suppress_tokens": list(range(3, 50))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(3, 50))},
    "forced_eos_token_id": {"forced_eos_token_id": 61},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 3.0)},
    "num_return_sequences": {"num_return_sequences": 2} | SAMPLED | {"top_k": 1},
    "eos_token_id": {"eos_token_id": list(range(2, 60))},
    "pad_token_id": {"pad_token_id": 77, "eos_token_id": list(range(2, 50))},
}
TESTED_ELSEWHERE = {
    "eta_cutoff",  # never leaves one choice alone
    "renormalize_logits",  # changes scores and no token
    "remove_invalid_values",
    "forced_bos_token_id",
    "stop_strings",
    "output_scores",
    "output_logits",
    "return_dict_in_generate",
}
# As in `model.generate` without beams, an encoder and a cache of a kind that is refused here.
WITHOUT_EFFECT: dict[str, object] = {
    "early_stopping": True,
    "length_penalty": 3.0,
    "diversity_penalty": 0.5,
    "bos_token_id": 5,
    "decoder_start_token_id": 5,
    "use_cache": False,
    "cache_config": {"nbits": 4},
    "max_cache_len": 4,
    "compile_config": CompileConfig(),
    "disable_compile": True,
    "continuous_batching_config": {},
    "_from_model_config": False,
    "transformers_version": "5.0.0",
}


def test_every_field_of_a_generation_config_is_honoured_or_refused_or_without_effect():
    """Fails when a new release of transformers brings a field that nobody has looked at."""
    known = HONOURED.keys() | TESTED_ELSEWHERE | WITHOUT_EFFECT.keys() | _REFUSED.keys() | _NOT_OURS.keys()
    assert set(GenerationConfig().to_dict()) <= known
    assert not (HONOURED.keys() | WITHOUT_EFFECT.keys()) & (_REFUSED.keys() | _NOT_OURS.keys())


@pytest.mark.parametrize("name", HONOURED)
def test_a_field_is_honoured_as_model_generate_honours_it(engine, name):
    if name not in GenerationConfig().to_dict():
        pytest.skip("this release of transformers does not have it")
    arguments = GREEDY | {"eos_token_id": 2} | HONOURED[name]
    found = engine.generate(UNPADDED, **arguments)
    assert torch.equal(found, engine.model.generate(UNPADDED, **arguments))
    del arguments[name]
    assert not torch.equal(found, engine.generate(UNPADDED, **arguments, seed=1))


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_field_is_without_effect_as_in_model_generate(engine, name):
    expected = engine.model.generate(IDS, **GREEDY)
    config = with_field(name, WITHOUT_EFFECT[name])
    assert torch.equal(engine.generate(IDS, generation_config=config), expected)


def test_each_field_that_is_not_transformers_default_is_refused(engine):
    for name in _NOT_OURS:
        with pytest.raises(UnsupportedError, match=f"{name}='other' is for transformers' own"):
            engine.generate(IDS, generation_config=with_field(name, "other"))


def with_field(name: str, value: object) -> GenerationConfig:
    config = GenerationConfig(**GREEDY)
    setattr(config, name, value)
    return config
