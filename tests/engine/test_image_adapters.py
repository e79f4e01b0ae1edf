"""Prompts with images, of rows with LoRA adapters: each is what PEFT's own model with that adapter writes."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from helpers.adapters import adapted
from helpers.models import paged, tiny_drafter, with_tree
from helpers.seeing_models import prompts_with_images, tiny_seeing_model
from redrafter import Engine, UnsupportedError

FAMILY = "qwen2_5_vl"
GREEDY = {"max_new_tokens": 16, "do_sample": False}
OF_TEXT = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|up_proj|down_proj)"
OF_EYES = r".*visual.*\.qkv"
CACHES = pytest.mark.parametrize("on", [lambda engine: engine, paged], ids=["dense", "paged"])


def saved_seeing(folder: Path, modules: str) -> PreTrainedModel:
    """Save an adapter of a model that sees images, and return the model with it."""
    model = adapted(model=tiny_seeing_model(FAMILY), target_modules=modules)
    model.save_pretrained(folder)
    return model


def make_engine(folder: Path) -> Engine:
    engine = with_tree(tiny_seeing_model(FAMILY), tiny_drafter(), 4, 3)
    engine.load_adapter("it", folder)
    return engine


def test_an_adapter_of_the_encoder_takes_texts_and_refuses_images(tmp_path):
    model = saved_seeing(tmp_path, f"{OF_TEXT}|{OF_EYES}")
    engine = make_engine(tmp_path)
    texts = prompts_with_images(model.get_base_model(), [(5,), (9,)])
    assert torch.equal(engine.generate(**texts, adapter="it", **GREEDY), model.generate(**texts, **GREEDY))
    images = prompts_with_images(model.get_base_model())
    with pytest.raises(UnsupportedError, match=r"'it' takes no images here: it changes .*visual.*qkv, .*merge"):
        engine.generate(**images, adapter="it", **GREEDY)
    expected = engine.model.generate(**images, **GREEDY)
    assert torch.equal(engine.generate(**images, **GREEDY), expected)  # rows without it see
