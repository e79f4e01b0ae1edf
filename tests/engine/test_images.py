"""Prompts with images: the text is what `model.generate` writes, whatever is drafted and beside whatever rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from helpers.adapters import adapted
from helpers.features import make_engine
from helpers.generation import ON_BOTH_CACHES, noted, same_as_model, same_undrafted
from helpers.models import VOCAB, paged, tiny_model, uneven_batch
from helpers.seeing_models import IMAGE, UNEVEN, VIDEO, images_for, prompts_with_images, tiny_seeing_model
from helpers.vocabularies import renumbered
from redrafter import ArgumentError, DraftTarget, Engine, UnsupportedError
from redrafter.drafting.vocabulary_map import DraftText
from redrafter.model.target import Target

RARER = [pytest.param(family, marks=pytest.mark.slow) for family in ("llava_next", "glm4v", "aya_vision", "internvl")]
FAMILIES = ["llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "mistral3", "llama4", *RARER]
GREEDY = {"max_new_tokens": 20, "do_sample": False}
SAMPLED = {"max_new_tokens": 16, "do_sample": True, "temperature": 1.1, "seed": 3}


def make(family: str, **options: Any) -> Engine:
    return make_engine("drafter", tiny_seeing_model(family), **options)


@ON_BOTH_CACHES
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_those_of_the_model_and_of_plain_decoding(family, on):
    engine = on(make(family))
    for layouts in (UNEVEN, UNEVEN[:1]):
        inputs = prompts_with_images(engine.model, layouts)
        expected = engine.model.generate(**inputs, **GREEDY)
        assert torch.equal(same_undrafted(engine, **inputs, **GREEDY), expected)
    inputs = prompts_with_images(engine.model)
    if family == "llama4":  # whose images `generate` does not repeat, and whose tiny encoder tells few apart
        return
    same_undrafted(engine, **inputs, num_return_sequences=2, **SAMPLED)
    same, other = (engine.generate(**inputs | {"pixel_values": x * inputs["pixel_values"]}, **GREEDY) for x in (1, -1))
    differs = (same != other).any(dim=1).tolist()
    assert not differs[1]  # a row of text
    assert any(differs)


def test_a_draft_model_with_another_vocabulary_reads_what_it_has_for_an_image(monkeypatch):
    model = tiny_seeing_model("llava")
    draft_model, vocabulary = renumbered(tiny_model("llama", max_position_embeddings=384), 0.4)
    assert vocabulary.counts[IMAGE] > 1
    engine = DraftTarget(Target(model), Target(draft_model), num_beams=2, vocabulary=vocabulary)
    read = noted(monkeypatch, engine.draft_model, "prefill", lambda _, told: told.tokens[0, : told.upto[0]].tolist())
    inputs, text = prompts_with_images(model, UNEVEN[:1]), DraftText(engine.draft_vocabulary)
    engine.generate(**inputs, **GREEDY)
    assert text.length(inputs["input_ids"][0].tolist()) > inputs["input_ids"].shape[1]
    assert read == [text.ids]


def test_model_generate_takes_images_with_an_engine_of_ours():
    engine = make("gemma3")
    inputs, model = prompts_with_images(engine.model), engine.model
    expected = model.generate(**inputs, **GREEDY)
    assert torch.equal(model.generate(**inputs, custom_generate=engine.custom_generate(), **GREEDY), expected)


def test_a_text_after_one_with_images_is_read_as_text():
    engine = paged(make("qwen2_vl"))
    engine.generate(**prompts_with_images(engine.model), **GREEDY)
    same_as_model(engine, *uneven_batch(), model=tiny_seeing_model("qwen2_vl"), **GREEDY)


def test_an_adapter_of_the_encoder_takes_texts_and_refuses_images(tmp_path):
    of_text = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|up_proj|down_proj)"
    model = adapted(model=tiny_seeing_model("qwen2_5_vl"), target_modules=rf"{of_text}|.*visual.*\.qkv")
    model.save_pretrained(tmp_path)
    engine = make("qwen2_5_vl")
    engine.load_adapter("it", tmp_path)
    texts, images = prompts_with_images(engine.model, [(5,), (9,)]), prompts_with_images(engine.model)
    assert torch.equal(engine.generate(**texts, adapter="it", **GREEDY), model.generate(**texts, **GREEDY))
    with pytest.raises(UnsupportedError, match=r"'it' changes .*visual.*qkv: images .* exclude each other: .*merge"):
        engine.generate(**images, adapter="it", **GREEDY)
    expected = engine.model.generate(**images, **GREEDY)
    assert torch.equal(engine.generate(**images, **GREEDY), expected)  # rows without it see


def pixels(places: int) -> dict[str, Any]:
    """A prompt with so many places for the four tokens of an image."""
    return {"input_ids": torch.tensor([[5, *[IMAGE] * places, 6]]), "pixel_values": torch.zeros(1, 3, 28, 28)}


def cut_short(model: PreTrainedModel) -> dict[str, Any]:
    inputs = prompts_with_images(model, UNEVEN[:1])
    return inputs | {"pixel_values": inputs["pixel_values"][:8]}


FRAMES = {
    "pixel_values_videos": torch.zeros(16, 1176),
    "video_grid_thw": torch.tensor([[1, 4, 4]]),
    "inputs_embeds": torch.zeros(1, 6, 32),
}
REFUSED: dict[str, tuple[str, Callable[[PreTrainedModel], dict[str, Any]], type[Exception], str]] = {
    **{
        name: (
            "qwen2_vl",
            lambda model, name=name: {"input_ids": torch.tensor([[5, *[VIDEO] * 4, 6]]), name: FRAMES[name]},
            UnsupportedError,
            rf"generate\(\) does not take {name}; pass ",
        )
        for name in FRAMES
    },
    **{
        f"{places} places": (
            "llava",
            lambda model, places=places: pixels(places),
            ArgumentError,
            f"encoded as 4 tokens, and the prompts have {places} places for them",
        )
        for places in (0, 3, 5)
    },
    "unreadable": ("qwen2_vl", cut_short, ArgumentError, "the model cannot read these images: The size of tensor"),
    "at the end": (
        "qwen2_vl",
        lambda model: prompts_with_images(model, [(3, "image")]),
        UnsupportedError,
        r"ends with an image .* let a text follow",
    ),
    "layers that attend to images": (
        "mllama",
        lambda model: {"input_ids": torch.tensor([[5, 6]]), "pixel_values": torch.zeros(1, 1, 1, 3, 28, 28)},
        UnsupportedError,
        "does not take pixel_values; pass text",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_model_cannot_see_is_refused(name):
    family, inputs, error, message = REFUSED[name]
    engine = make(family)
    assert engine.target.images.support.ok == (family != "mllama")
    with pytest.raises(error, match=message):
        engine.generate(**inputs(engine.model), **GREEDY)


def test_a_batch_invariant_engine_takes_no_images():
    engine = make("llava", batch_invariant=True)
    with pytest.raises(UnsupportedError, match="images in prompts and batch_invariant=True exclude each other"):
        engine.generate(**prompts_with_images(engine.model), **GREEDY)


def test_a_model_without_eyes_takes_no_images():
    engine = make_engine("drafter")
    assert not engine.target.images.support.ok
    with pytest.raises(ArgumentError, match="no argument 'pixel_values'"):
        engine.generate(**pixels(0))


def test_scores_are_those_of_plain_decoding():
    engine, kept = make("qwen2_5_vl"), {"return_dict_in_generate": True, "output_logits": True}
    inputs = prompts_with_images(engine.model)
    assert len(set(images_for(engine.model, 3)[1])) > 1  # images of unequal sizes
    found, expected = (write.generate(**inputs, **GREEDY, **kept).logits for write in (engine, engine.model))
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), atol=1e-3, rtol=1e-3)
    assert found[0].shape == (len(UNEVEN), VOCAB)
