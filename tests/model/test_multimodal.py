"""Models with an encoder beside their text, used for text; `tests/engine/test_images.py` has images."""

import pytest
import torch

from helpers.models import check_texts, paged, tiny_drafter, tiny_model, uneven_batch, with_tree
from helpers.seeing_models import FAMILIES, IMAGE, tiny_seeing_model
from redrafter import UnsupportedError

NEW = 16


@pytest.mark.parametrize("family", FAMILIES)
def test_text_without_images_is_what_model_generate_writes(family):
    made = [with_tree(tiny_seeing_model(family), tiny_drafter(), 5, 3) for _ in range(2)]
    assert made[0].target.paged.ok
    for rows in (4, 1):  # one row alone needs no mask
        check_texts(made[0], rows=rows)
    check_texts(paged(made[1]))


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


IMAGES = torch.tensor([[5, IMAGE, IMAGE, IMAGE, IMAGE, 6]])
TYPES = {  # GPT-2 adds the embedding of the id 0
    "mm_token_type_ids": (lambda: tiny_seeing_model("qwen2_vl"), IMAGES, (IMAGES == IMAGE).long()),
    "token_type_ids": (lambda: tiny_model("gpt2"), uneven_batch(rows=1)[0], torch.zeros(1, 11, dtype=torch.long)),
}


@pytest.mark.parametrize("name", TYPES)
def test_token_types_of_images_without_images_or_that_are_embedded_are_refused(name):
    make, ids, types = TYPES[name]
    with pytest.raises(UnsupportedError, match=f"does not take {name}"):
        with_tree(make(), tiny_drafter(), 5, 3).generate(ids, **{name: types})


@pytest.mark.parametrize("shift", [torch.tensor([0, 0, 1, 0]), torch.tensor([1, 1, 1, 1])])
def test_positions_that_differ_between_axes_or_from_the_text_are_refused(shift):
    model = tiny_seeing_model("qwen2_vl")
    engine = with_tree(model, tiny_drafter(), 5, 3)
    ids, _ = uneven_batch(rows=1)
    positions = torch.arange(ids.shape[1]).expand(4, 1, -1) + shift[:, None, None]
    with pytest.raises(UnsupportedError, match="position_ids of your own"):
        model.generate(ids, position_ids=positions, custom_generate=engine.custom_generate(), max_new_tokens=2)
