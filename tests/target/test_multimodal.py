"""Models with an encoder beside their text, used for text."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from helpers.models import VOCAB, paged, tiny_drafter, tiny_model, uneven_batch, with_tree
from redrafter import ReDrafter, UnsupportedError
from redrafter.target.target import Target

NEW = 16
IMAGE = 90  # the id that stands for an image; the prompts of these tests hold others

_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EYES = {
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 4,
    "num_heads": 4,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 32,
}
_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_PIXEL_SHUFFLE = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}

# model type -> what differs in its text, and in its encoder
FAMILIES: dict[str, tuple[dict, dict]] = {
    "gemma3": ({"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, {}),
    "mistral3": ({}, {}),
    "llama4": (
        _EXPERTS | {"num_experts_per_tok": 1, "intermediate_size_mlp": 48, "attention_chunk_size": 6},
        _PIXEL_SHUFFLE,
    ),
    "llava": ({}, {}),
    "llava_next": ({}, {}),
    "llava_onevision": ({}, {}),
    "internvl": ({}, {"image_size": [28, 28], "patch_size": [14, 14]}),
    "aya_vision": ({}, {}),
    "idefics3": ({}, {}),
    "smolvlm": ({}, {}),
    "qwen2_vl": (_AXES, {}),
    "qwen2_5_vl": (_AXES, {"fullatt_block_indexes": [0]}),
    "qwen3_vl": (_AXES, {"deepstack_visual_indexes": [0]}),
    "qwen3_vl_moe": (_AXES | _EXPERTS, {"deepstack_visual_indexes": [0]}),
    "glm4v": (_AXES, {}),
    "gemma4": (
        {"layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6, "sliding_window": 6}
        | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
        | {"global_head_dim": 16},
        {"head_dim": 8, "num_key_value_heads": 4},
    ),
    # Two of its layers attend to images alone.
    "mllama": (
        {"num_hidden_layers": 5, "cross_attention_layers": [1, 3], "rope_parameters": _AXES["rope_parameters"]},
        {"num_global_layers": 1, "intermediate_layers_indices": [0]},
    ),
}


def tiny_seeing_model(model_type: str) -> PreTrainedModel:
    """Return a random model of that family, fp32, with its own seed."""
    text, eyes = FAMILIES[model_type]
    marks = {"image_token_id": IMAGE, "image_token_index": IMAGE, "video_token_id": IMAGE}
    config = AutoConfig.for_model(
        model_type, text_config=_TEXT | text, vision_config=_EYES | eyes, vision_feature_layer=-1, **marks
    )
    torch.manual_seed(sum(map(ord, model_type)))
    return AutoModelForImageTextToText.from_config(config).float().eval()


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


def test_images_are_refused_by_name():
    model = tiny_seeing_model("llava")
    engine = with_tree(model, tiny_drafter(), 5, 3)
    ids = torch.tensor([[5, IMAGE, IMAGE, IMAGE, IMAGE, 6]])
    pixels = torch.zeros(1, 3, 28, 28)
    with pytest.raises(UnsupportedError, match="generate\\(\\) does not take pixel_values; pass text alone"):
        engine.generate(ids, pixel_values=pixels)
    with pytest.raises(UnsupportedError, match=r"does not take (pixel_values|mm_encoder_outputs); pass text alone"):
        model.generate(ids, pixel_values=pixels, custom_generate=engine.custom_generate())
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
