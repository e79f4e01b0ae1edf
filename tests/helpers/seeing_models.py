"""Tiny models that see images, of many families, and prompts with images for them."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from helpers.models import VOCAB

IMAGE, VIDEO = 90, 91  # the ids that stand for an image and for a video; the texts of these tests hold others

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
    "initializer_range": 0.2,
}
_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_PIXEL_SHUFFLE = {
    "intermediate_size": 128,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}

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
# model type -> what differs in the rest of its config
_WHOLE: dict[str, dict] = {
    "gemma3": {"mm_tokens_per_image": 4},
    "llava_next": {"image_grid_pinpoints": [[28, 28], [28, 56], [56, 28]]},
}


def tiny_seeing_model(model_type: str, image: int = IMAGE, **changes: object) -> PreTrainedModel:
    """Return a random model of that family, fp32, with its own seed; `image` is the id that stands for an image."""
    text, eyes = FAMILIES[model_type]
    marks = {"image_token_id": image, "image_token_index": image, "video_token_id": VIDEO} | _WHOLE.get(model_type, {})
    config = AutoConfig.for_model(
        model_type, text_config=_TEXT | text | changes, vision_config=_EYES | eyes, vision_feature_layer=-1, **marks
    )
    torch.manual_seed(sum(map(ord, model_type)))
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    for weight in model.parameters():
        if not weight.any() and weight.dim() == 2:  # Gemma's projector, which would make all images the same
            torch.nn.init.normal_(weight.data, std=0.2)
    return model


def images_for(model: PreTrainedModel, count: int, seed: int = 0) -> tuple[dict[str, Any], list[int]]:
    """Return random images as the model's processor would give them, and how many tokens each takes."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return 2 * torch.randn(*shape, generator=generator)

    kind, square = model.config.model_type, (3, 28, 28)
    if "mrope_section" in (model.config.get_text_config().rope_parameters or {}):
        grids = torch.tensor([[1, 4, 4], [1, 2, 6], [1, 4, 2]] * count)[:count]  # of unequal sizes
        patch = model.config.vision_config.patch_size**2 * model.config.vision_config.temporal_patch_size * 3
        inputs = {"pixel_values": noise(int(grids.prod(dim=1).sum()), patch), "image_grid_thw": grids}
    elif kind == "llava_next":
        sizes = torch.tensor([[28, 56], [56, 28]] * count)[:count]
        inputs = {"pixel_values": noise(count, 3, *square), "image_sizes": sizes}
    elif kind == "mistral3":
        sizes = torch.tensor([[56, 28], [28, 56], [56, 56]] * count)[:count]
        inputs = {"pixel_values": noise(count, 3, 56, 56), "image_sizes": sizes}
    else:
        inputs = {"pixel_values": noise(count, *square)}
    with torch.no_grad():
        encoded = model.get_image_features(**inputs, return_dict=True)
    features = encoded.last_hidden_state if encoded.pooler_output is None else encoded.pooler_output
    return inputs, [len(feature.flatten(0, -2)) for feature in features]


Layout = Sequence[int | str]  # of a prompt: numbers of random tokens, and "image"

# Unequal rows: one image, no image, two images, one behind a longer text.
UNEVEN: tuple[Layout, ...] = ((3, "image", 4), (5,), (2, "image", 1, "image", 3), (9, "image", 2))


def prompts_with_images(model: PreTrainedModel, layouts: Sequence[Layout] = UNEVEN, seed: int = 0) -> dict[str, Any]:
    """Return what a processor returns of prompts with images: left-padded ids, their mask, and the images."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(part == "image" for layout in layouts for part in layout)
    inputs, sizes = images_for(model, count, seed) if count else ({}, [])
    left = iter(sizes)
    rows = []
    for layout in layouts:
        row = [
            torch.full((next(left),), IMAGE)
            if isinstance(part, str)
            else torch.randint(3, IMAGE, (part,), generator=generator)
            for part in layout
        ]
        rows.append(torch.cat(row))
    width = max(map(len, rows))
    ids = torch.stack([torch.cat([torch.zeros(width - len(row), dtype=torch.long), row]) for row in rows])
    mask = torch.stack([(torch.arange(width) >= width - len(row)).long() for row in rows])
    for types in {"token_type_ids", "mm_token_type_ids"} & inspect.signature(model.forward).parameters.keys():
        inputs[types] = (ids == IMAGE).long()
    return {"input_ids": ids, "attention_mask": mask, **inputs}
