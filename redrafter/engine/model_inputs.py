"""The inputs of a model in addition to ids and mask: images, and inputs that add nothing to a text.

Models with an encoder in addition to their decoder receive its inputs in every call, from transformers' `generate` or
from a processor, and some take a position for each axis of an image. For text alone, these inputs add nothing to ids
and mask. Images are taken by models that accept encoded images; any other input is rejected by name.
"""

import inspect
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from redrafter.cache.dense import CACHE_NAMES, cache_in
from redrafter.errors import UnsupportedError
from redrafter.model.images import ImagePrompt, Prepared, marks_tokens, split_rows, to_model
from redrafter.model.target import Target

# Inputs of the loop in transformers, which this library's loop does not need.
_LOOP = frozenset({*CACHE_NAMES, "use_cache", "cache_position", "logits_to_keep"})


def separate_inputs(
    arguments: Mapping[str, object], target: Target, known: AbstractSet[str]
) -> tuple[dict[str, Any], dict[str, object]]:
    """Separate the inputs of the model, which its forward names, from the other arguments of a call.

    `known` are names of arguments that are never inputs of a model.

    Returns:
        The other arguments; and the images with their types of tokens, on the model's device. Empty inputs, as
        processors return them for text without images, are in neither.

    Raises:
        UnsupportedError: Naming an input that is no image, or images that cannot be taken.
    """
    model = target.model
    # The usual call has no inputs of the model, and inspecting a signature takes long.
    if arguments.keys() <= known:
        return dict(arguments), {}
    inputs = (inspect.signature(model.forward).parameters.keys() | target.image_arguments) - known
    given = {name: value for name, value in arguments.items() if name in inputs and not _is_empty(value)}
    images = {name: value for name, value in given.items() if name in target.image_arguments}
    if images and target.images.support.ok:
        images |= {name: value for name, value in given.items() if marks_tokens(name, model)}
    for name in sorted(given.keys() - images.keys()):
        _check_empty(name, given[name], model)
    if images:
        target.images.check()
    others = {name: value for name, value in arguments.items() if name not in inputs}
    return others, {name: to_model(value, target.device) for name, value in images.items()}


def read_prepared(prepared: Prepared, input_ids: Tensor, seen: Tensor, target: Target) -> list[ImagePrompt | None]:
    """Return the images of each row, None for a row without any, from the inputs that transformers has prepared.

    `prepared` are the inputs of the model in addition to ids and mask; `seen` is False where a row is padded,
    `[B, P]`.

    Raises:
        ArgumentError: The images do not fit the prompts.
        UnsupportedError: An input adds information to the ids, their mask and images.
    """
    past, positions = cache_in(prepared), prepared.get("position_ids")
    if past is not None and past.get_seq_length() > 0:
        raise UnsupportedError("past_key_values cannot be continued from; pass the whole text as input_ids")
    images = split_rows(prepared, input_ids, seen, target.model)
    of_images = {"position_ids"}
    if any(images):
        target.images.check()
    of_images |= {name for row in images if row is not None for name in row.inputs}
    # Rows with images have multimodal positions, which `split_rows` has checked.
    text = torch.tensor([row is None for row in images])
    if positions is not None and not _count_tokens(positions.to(seen.device), seen, text):
        raise UnsupportedError("position_ids of your own cannot be honoured; leave them out")
    for name in sorted(prepared.keys() - _LOOP - of_images):
        _check_empty(name, prepared[name], target.model)
    return images


def _check_empty(name: str, value: object, model: PreTrainedModel) -> None:
    if not (_is_empty(value) or (marks_tokens(name, model) and isinstance(value, Tensor) and not value.any())):
        taken = "pass text, as input_ids and attention_mask, with images at most"
        raise UnsupportedError(f"generate() does not take {name}; {taken}")


def _count_tokens(positions: Tensor, seen: Tensor, rows_of_text: Tensor) -> bool:
    """Return whether positions count tokens from 0 in each row of text, ignoring padding.

    Positions are `[B, P]`, or `[A, B, P]` with one position per axis, which are equal for text; B may be 1 for all.
    """
    rows, width = seen.shape
    if positions.dim() not in (2, 3) or positions.shape[-1] != width or positions.shape[-2] not in (1, rows):
        return False
    counted = seen.cumsum(dim=1) - 1  # [B, P]
    if torch.equal(positions, counted):  # as they are where no row is padded
        return True
    return bool(((positions == counted) | ~(seen & rows_of_text[:, None])).all())


def _is_empty(value: object) -> bool:
    """Return whether an input is empty, as the encoding of no image is."""
    if isinstance(value, Mapping):
        return all(map(_is_empty, value.values()))
    return value is None or (isinstance(value, list | tuple) and all(map(_is_empty, value)))
