"""Prompts with images: the text is what `model.generate` writes, whatever is drafted and beside whatever rows."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from helpers.eagle import random_head
from helpers.models import VOCAB, paged, tiny_drafter, tiny_model, uneven_batch, with_tree
from helpers.seeing_models import IMAGE, UNEVEN, VIDEO, images_for, prompts_with_images, tiny_seeing_model
from helpers.vocabularies import renumbered
from redrafter import ArgumentError, DraftTarget, Engine, PromptLookup, RecurrentDrafter, UnsupportedError
from redrafter.drafting.proposer import PlainProposer
from redrafter.drafting.vocabulary_map import DraftText
from redrafter.engine.options import EngineOptions
from redrafter.model.target import Target

RARER = [pytest.param(family, marks=pytest.mark.slow) for family in ("llava_next", "glm4v", "aya_vision", "internvl")]
FAMILIES = ["llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "mistral3", *RARER]
GREEDY = {"max_new_tokens": 20, "do_sample": False}
SAMPLED = {"max_new_tokens": 16, "do_sample": True, "temperature": 1.1, "seed": 3}


def on_either_cache(make: Callable[[], Engine]) -> dict[str, Engine]:
    return {"dense": make(), "paged": paged(make())}


@pytest.fixture(scope="module", params=FAMILIES)
def seeing(request) -> PreTrainedModel:
    return tiny_seeing_model(request.param)


@pytest.fixture(scope="module")
def engines(seeing) -> dict[str, Engine]:
    return on_either_cache(lambda: with_tree(seeing, tiny_drafter(), 5, 3))


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("layouts", [UNEVEN, UNEVEN[:1]], ids=["uneven", "alone"])
@pytest.mark.parametrize("cache", ["dense", "paged"])
def test_greedy_is_what_model_generate_writes(seeing, engines, cache, layouts, speculate):
    inputs = prompts_with_images(seeing, layouts)
    expected = seeing.generate(**inputs, **GREEDY)
    assert torch.equal(engines[cache].generate(**inputs, speculate=speculate, **GREEDY), expected)


@pytest.mark.parametrize("cache", ["dense", "paged"])
def test_sampled_texts_are_plain_decodings(seeing, engines, cache):
    inputs = prompts_with_images(seeing)
    plain = engines["dense"].generate(**inputs, speculate=False, num_return_sequences=2, **SAMPLED)
    assert torch.equal(engines[cache].generate(**inputs, num_return_sequences=2, **SAMPLED), plain)


def test_other_images_make_another_text(seeing, engines):
    inputs = prompts_with_images(seeing)
    pixels = inputs["pixel_values"].flip(-1)
    same, other = (engines["paged"].generate(**inputs | {"pixel_values": x}, **GREEDY) for x in (-pixels, pixels))
    differs = (same != other).any(dim=1).tolist()
    assert not differs[1]  # a row of text
    assert any(differs)


@pytest.mark.parametrize("cache", ["dense", "paged"])
def test_images_are_read_where_layers_attend_within_chunks(cache):
    model = tiny_seeing_model("llama4")
    engine = on_either_cache(lambda: with_tree(model, tiny_drafter(), 5, 3))[cache]
    inputs = prompts_with_images(model)
    assert torch.equal(engine.generate(**inputs, **GREEDY), model.generate(**inputs, **GREEDY))


@pytest.mark.parametrize("cache", ["dense", "paged"])
def test_rows_wait_for_places_with_their_images(cache):
    model = tiny_seeing_model("qwen2_5_vl")

    def make() -> Engine:
        return Engine(Target(model), with_tree(model, tiny_drafter(), 3, 3).proposer, EngineOptions(max_batch_size=2))

    inputs = prompts_with_images(model, [*UNEVEN, *UNEVEN])
    expected = model.generate(**inputs, **GREEDY)
    assert torch.equal(on_either_cache(make)[cache].generate(**inputs, **GREEDY), expected)


def layered_drafter() -> RecurrentDrafter:
    """Make a drafter that reads earlier layers and attends to what it stored of the prompt."""
    return tiny_drafter(recurrence="gated", target_layers=(0, 1), context_window=12, context_head_dim=8)


def other_vocabulary(model: PreTrainedModel) -> Engine:
    """Make an engine whose draft model reads many tokens, that of an image among them, as several of its own."""
    draft_model, vocabulary = renumbered(tiny_model("llama", max_position_embeddings=384), 0.4)
    assert vocabulary.counts[IMAGE] > 1
    return DraftTarget(Target(model), Target(draft_model), num_beams=2, vocabulary=vocabulary)


MAKERS = {
    "layers": lambda model: with_tree(model, layered_drafter(), 4, 3),
    "draft_model": lambda model: DraftTarget(Target(model), Target(tiny_model("llama")), num_beams=2),
    "other_vocabulary": other_vocabulary,
    "eagle": lambda model: with_tree(model, random_head(), 4, 3),
    "prompt_lookup": lambda model: PromptLookup.from_pretrained(model),
}


@pytest.mark.parametrize("cache", ["dense", "paged"])
@pytest.mark.parametrize("drafts", MAKERS)
def test_whatever_drafts_changes_nothing(drafts, cache):
    model = tiny_seeing_model("qwen3_vl")
    engine = on_either_cache(lambda: MAKERS[drafts](model))[cache]
    inputs = prompts_with_images(model)
    assert torch.equal(engine.generate(**inputs, **GREEDY), model.generate(**inputs, **GREEDY))


def test_a_draft_model_with_another_vocabulary_reads_what_it_has_for_an_image(monkeypatch):
    model = tiny_seeing_model("llava")
    engine, read = other_vocabulary(model), []
    prefill = engine.draft_model.prefill
    monkeypatch.setattr(
        engine.draft_model,
        "prefill",
        lambda prompts: read.append(prompts.tokens[0, : prompts.upto[0]].tolist()) or prefill(prompts),
    )
    inputs, text = prompts_with_images(model, UNEVEN[:1]), DraftText(engine.draft_vocabulary)
    engine.generate(**inputs, **GREEDY)
    assert text.length(inputs["input_ids"][0].tolist()) > inputs["input_ids"].shape[1]
    assert read == [text.ids]


def test_model_generate_takes_images_with_an_engine_of_ours():
    model = tiny_seeing_model("gemma3")
    engine = with_tree(model, tiny_drafter(), 5, 3)
    inputs = prompts_with_images(model)
    expected = model.generate(**inputs, **GREEDY)
    assert torch.equal(model.generate(**inputs, custom_generate=engine.custom_generate(), **GREEDY), expected)


def test_a_text_after_one_with_images_is_read_as_text():
    model = tiny_seeing_model("qwen2_vl")
    engine = paged(with_tree(model, tiny_drafter(), 5, 3))
    engine.generate(**prompts_with_images(model), **GREEDY)
    ids, mask = uneven_batch()
    expected = tiny_seeing_model("qwen2_vl").generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(engine.generate(ids, mask, **GREEDY), expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pixel_values_videos", torch.zeros(16, 1176)),
        ("video_grid_thw", torch.tensor([[1, 4, 4]])),
        ("inputs_embeds", torch.zeros(1, 6, 32)),
    ],
)
def test_videos_and_embeddings_are_refused_by_name(name, value):
    engine = with_tree(tiny_seeing_model("qwen2_vl"), tiny_drafter(), 5, 3)
    with pytest.raises(UnsupportedError, match=f"generate\\(\\) does not take {name}; pass "):
        engine.generate(torch.tensor([[5, VIDEO, VIDEO, VIDEO, VIDEO, 6]]), **{name: value})


@pytest.mark.parametrize("places", [0, 3, 5])
def test_images_that_do_not_fit_their_prompt_are_refused(places):
    model = tiny_seeing_model("llava")
    engine = with_tree(model, tiny_drafter(), 5, 3)
    ids = torch.tensor([[5, *[IMAGE] * places, 6]])
    with pytest.raises(ArgumentError, match=f"encoded as 4 tokens, and the prompts have {places} places for them"):
        engine.generate(ids, pixel_values=torch.zeros(1, 3, 28, 28))


def test_images_that_the_model_cannot_read_are_refused():
    model = tiny_seeing_model("qwen2_vl")
    inputs = prompts_with_images(model, UNEVEN[:1])
    inputs["pixel_values"] = inputs["pixel_values"][:8]
    with pytest.raises(ArgumentError, match="the model cannot read these images: The size of tensor"):
        with_tree(model, tiny_drafter(), 5, 3).generate(**inputs, **GREEDY)


def test_a_batch_invariant_engine_takes_no_images():
    model = tiny_seeing_model("llava")
    engine = Engine(Target(model), PlainProposer(), EngineOptions(batch_invariant=True))
    with pytest.raises(UnsupportedError, match="takes no images here: it is batch-invariant"):
        engine.generate(**prompts_with_images(model), **GREEDY)


def test_a_prompt_that_ends_with_an_image_is_refused_where_images_have_axes():
    model = tiny_seeing_model("qwen2_vl")
    engine = with_tree(model, tiny_drafter(), 5, 3)
    with pytest.raises(UnsupportedError, match=r"ends with an image .* let a text follow"):
        engine.generate(**prompts_with_images(model, [(3, "image")]), **GREEDY)


def test_a_model_whose_layers_attend_to_images_takes_none():
    model = tiny_seeing_model("mllama")
    engine = with_tree(model, tiny_drafter(), 5, 3)
    assert not engine.target.images.ok
    with pytest.raises(UnsupportedError, match="does not take pixel_values; pass text"):
        engine.generate(torch.tensor([[5, 6]]), pixel_values=torch.zeros(1, 1, 1, 3, 28, 28))


def test_a_model_without_eyes_takes_no_images():
    engine = with_tree(tiny_model("llama"), tiny_drafter(), 5, 3)
    assert not engine.target.images.ok
    with pytest.raises(ArgumentError, match="no argument 'pixel_values'"):
        engine.generate(torch.tensor([[5, 6]]), pixel_values=torch.zeros(1, 3, 28, 28))


def test_scores_are_those_of_plain_decoding():
    model = tiny_seeing_model("qwen2_5_vl")
    inputs = prompts_with_images(model)
    kept = {"return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(**inputs, **GREEDY, **kept)
    found = with_tree(model, tiny_drafter(), 5, 3).generate(**inputs, **GREEDY, **kept)
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    assert found.logits[0].shape == (len(UNEVEN), VOCAB)


def test_images_of_unequal_sizes_take_unequal_places():
    _, sizes = images_for(tiny_seeing_model("qwen2_5_vl"), 3)
    assert len(set(sizes)) > 1
