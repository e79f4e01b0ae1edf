"""Models with an encoder beside their text, used for text; `tests/engine/test_images.py` has images."""

import pytest
import torch
from transformers import PreTrainedModel

from helpers.models import paged, tiny_drafter, tiny_model, uneven_batch, with_tree
from helpers.seeing_models import FAMILIES, IMAGE, tiny_seeing_model
from redrafter import ReDrafter, UnsupportedError
from redrafter.model.target import Target

NEW = 16


def engines(model: PreTrainedModel) -> list[ReDrafter]:
    """Return an engine for each kind of cache that serves the model."""
    made = with_tree(model, tiny_drafter(), 5, 3)
    assert made.target.paged.ok
    return [made, paged(with_tree(model, tiny_drafter(), 5, 3))]


@pytest.mark.parametrize("family", FAMILIES)
def test_text_without_images_is_what_model_generate_writes(family):
    model = tiny_seeing_model(family)
    ids, mask = uneven_batch()
    arguments = {"max_new_tokens": NEW, "do_sample": False}
    for rows in (slice(0, 4), slice(0, 1)):  # the first row alone needs no mask
        expected = model.generate(ids[rows], attention_mask=mask[rows], **arguments)
        for engine in engines(model):
            for speculate in (True, False):
                out = engine.generate(ids[rows], mask[rows], speculate=speculate, **arguments)
                assert torch.equal(out, expected)


@pytest.mark.parametrize("family", ["gemma3", "qwen2_vl"])
def test_several_samples_of_each_prompt_are_plain_decodings(family):
    model = tiny_seeing_model(family)
    ids, mask = uneven_batch(rows=2)
    arguments = {"max_new_tokens": NEW, "do_sample": True, "num_return_sequences": 3, "seed": 5}
    plain = with_tree(model, tiny_drafter(), 5, 3).generate(ids, mask, speculate=False, **arguments)
    for engine in engines(model):
        assert torch.equal(engine.generate(ids, mask, **arguments), plain)


@pytest.mark.parametrize("family", ["gemma3", "qwen2_vl"])
def test_what_a_processor_adds_to_a_text_without_images_is_taken(family):
    model = tiny_seeing_model(family)
    name = {"gemma3": "token_type_ids", "qwen2_vl": "mm_token_type_ids"}[family]
    ids, mask = uneven_batch()
    inputs = {"input_ids": ids, "attention_mask": mask, name: torch.zeros_like(ids)}
    arguments = {"max_new_tokens": NEW, "do_sample": False}
    expected = model.generate(**inputs, **arguments)
    engine = with_tree(model, tiny_drafter(), 5, 3)
    assert torch.equal(engine.generate(**inputs, pixel_values=None, **arguments), expected)
    assert torch.equal(model.generate(**inputs, custom_generate=engine.custom_generate(), **arguments), expected)


def test_token_types_of_images_without_images_are_refused():
    ids = torch.tensor([[5, IMAGE, IMAGE, IMAGE, IMAGE, 6]])
    marked = torch.tensor([[0, 1, 1, 1, 1, 0]])
    with pytest.raises(UnsupportedError, match="does not take mm_token_type_ids"):
        with_tree(tiny_seeing_model("qwen2_vl"), tiny_drafter(), 5, 3).generate(ids, mm_token_type_ids=marked)


def test_token_types_that_are_embedded_are_refused():
    model = tiny_model("gpt2")  # which adds the embedding of the id 0
    ids, _ = uneven_batch(rows=1)
    with pytest.raises(UnsupportedError, match="does not take token_type_ids"):
        with_tree(model, tiny_drafter(), 5, 3).generate(ids, token_type_ids=torch.zeros_like(ids))


@pytest.mark.parametrize("shift", [torch.tensor([0, 0, 1, 0]), torch.tensor([1, 1, 1, 1])])
def test_positions_that_differ_between_axes_or_from_the_text_are_refused(shift):
    model = tiny_seeing_model("qwen2_vl")
    engine = with_tree(model, tiny_drafter(), 5, 3)
    ids, _ = uneven_batch(rows=1)
    positions = torch.arange(ids.shape[1]).expand(4, 1, -1) + shift[:, None, None]
    with pytest.raises(UnsupportedError, match="position_ids of your own"):
        model.generate(ids, position_ids=positions, custom_generate=engine.custom_generate(), max_new_tokens=2)


def test_a_prompt_that_is_read_in_both_directions_is_the_reason_of_a_refusal():
    with pytest.raises(UnsupportedError, match="reads its prompt in both directions"):
        Target(tiny_model("gemma", use_bidirectional_attention=True, head_dim=8))


def test_a_directory_of_a_model_that_sees_images_is_opened(tmp_path):
    model = tiny_seeing_model("qwen2_vl")
    model.save_pretrained(tmp_path)
    engine = ReDrafter.from_pretrained(tmp_path, tiny_drafter())
    ids, mask = uneven_batch()
    arguments = {"max_new_tokens": NEW, "do_sample": False}
    expected = model.generate(ids, attention_mask=mask, **arguments)
    assert torch.equal(engine.generate(ids, mask, **arguments), expected)
