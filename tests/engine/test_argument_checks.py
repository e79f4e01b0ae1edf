"""Arguments and modes of `generate` that are refused by name, and those of a checkpoint that refuse no call."""

import pytest
import torch
from transformers import CompileConfig, GenerationConfig

from helpers.models import engine_with_config, uneven_batch
from redrafter import ArgumentError, UnsupportedError
from redrafter.engine.arguments import _NOT_OURS, _REFUSED

IDS, MASK = uneven_batch()
GREEDY = {"max_new_tokens": 12, "do_sample": False}


def test_an_unknown_argument_is_refused_with_the_name_that_was_meant(engine):
    with pytest.raises(ArgumentError, match="max_new_tokens"):
        engine.generate(IDS, MASK, max_new_token=5)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"num_beams": 4}, "num_beams=4"),
        ({"guidance_scale": 2.0}, "guidance_scale"),
        ({"penalty_alpha": 0.6}, "penalty_alpha"),
        ({"dola_layers": "low"}, "dola_layers"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"output_attentions": True}, "output_attentions"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"encoder_repetition_penalty": 1.2}, "encoder_repetition_penalty"),
        ({"num_assistant_tokens": 5}, "num_assistant_tokens=5 .* argument of from_pretrained"),
        ({"max_matching_ngram_size": 3}, "max_matching_ngram_size"),
        ({"prefill_chunk_size": 64}, "prefill_chunk_size"),
    ],
)
def test_a_mode_that_cannot_be_honoured_is_refused_by_name(engine, arguments, named):
    with pytest.raises(UnsupportedError, match=named):
        engine.generate(IDS, MASK, **arguments)


@pytest.mark.parametrize(
    "settings", [{"use_cache": False}, {"cache_implementation": "static"}, {"num_assistant_tokens": 7}]
)
def test_a_setting_that_only_the_checkpoint_asks_for_refuses_no_call(settings):
    engine, model = engine_with_config(**settings)
    expected = model.generate(IDS, attention_mask=MASK, **GREEDY, use_cache=True, cache_implementation=None)
    assert torch.equal(engine.generate(IDS, MASK, **GREEDY), expected)
    adapted = model.generate(IDS, attention_mask=MASK, custom_generate=engine.custom_generate(), **GREEDY)
    assert torch.equal(adapted, expected)


def test_a_cache_that_the_call_asks_for_is_refused_though_it_is_the_checkpoints():
    engine, _ = engine_with_config(cache_implementation="static")
    with pytest.raises(UnsupportedError, match="cache_implementation='static'"):
        engine.generate(IDS, MASK, cache_implementation="static", **GREEDY)


def test_a_cache_that_a_config_asks_for_is_refused_before_transformers_makes_it(engine, monkeypatch):
    def stream_without_a_driver():
        raise RuntimeError("CUDA driver version is insufficient")  # as from torch for CUDA on a machine that has none

    monkeypatch.setattr(torch, "Stream", stream_without_a_driver)
    config = GenerationConfig(cache_implementation="offloaded", **GREEDY)
    with pytest.raises(UnsupportedError, match="cache_implementation='offloaded'"):
        engine.generate(IDS, MASK, generation_config=config)


# Every field of a GenerationConfig is honoured, refused by name, or without effect. Here are calls that a field
# changes: greedy, or so narrow that sampling has no choice, so that `model.generate` writes the same.
UNPADDED = torch.arange(24).view(3, 8) + 5
SAMPLED = {"do_sample": True, "top_k": 0}
HONOURED: dict[str, dict] = {
    "max_length": {"max_length": 13, "max_new_tokens": None},
    "max_new_tokens": {"max_new_tokens": 3},
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
    config = GenerationConfig(**GREEDY)
    expected = engine.model.generate(IDS, generation_config=config)
    setattr(config, name, WITHOUT_EFFECT[name])
    assert torch.equal(engine.generate(IDS, generation_config=config), expected)


def test_each_field_that_is_not_transformers_default_is_refused(engine):
    for name in _NOT_OURS:
        with pytest.raises(UnsupportedError, match=f"{name}='other' is for transformers' own"):
            engine.generate(IDS, generation_config=with_field(name, "other"))


def with_field(name: str, value: object) -> GenerationConfig:
    config = GenerationConfig(**GREEDY)
    setattr(config, name, value)
    return config
