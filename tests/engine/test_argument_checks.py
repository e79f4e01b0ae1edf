"""Arguments and modes of `generate` that are refused by name, and those of a checkpoint that refuse no call."""

import pytest
import torch
from transformers import GenerationConfig

from helpers.models import engine_with_config, uneven_batch
from redrafter import ArgumentError, UnsupportedError

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
    ],
)
def test_a_mode_that_cannot_be_honoured_is_refused_by_name(engine, arguments, named):
    with pytest.raises(UnsupportedError, match=named):
        engine.generate(IDS, MASK, **arguments)


@pytest.mark.parametrize("settings", [{"use_cache": False}, {"cache_implementation": "static"}])
def test_a_cache_that_only_the_checkpoint_asks_for_refuses_no_call(settings):
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
