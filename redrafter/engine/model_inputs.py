"""Inputs of a model beside the ids and their mask.

Models with an encoder beside their text are told about its inputs in every call, from transformers' `generate` or
from a processor, and some get a position for each axis of an image. For text alone, all of it says what ids and mask
say already. Images are taken by models that can be given what was encoded of them; anything more is refused by name.
"""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from redrafter.errors import UnsupportedError
from redrafter.target.images import ImagePrompt, marks_tokens, split_rows, to_model
from redrafter.target.target import Target

__all__ = ["read_prepared", "separate_inputs"]

# Inputs of the loop in transformers, which this library's loop does not need.
_LOOP = frozenset({"past_key_values", "cache_params", "use_cache", "cache_position", "logits_to_keep"})
_TAKEN = "pass text, as input_ids and attention_mask, with images at most"


def separate_inputs(
    arguments: Mapping[str, Any], target: Target, known: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate the inputs of the model from the other arguments of a call.

    Args:
        arguments: Keyword arguments of a call of `generate`.
        target: The model, whose forward names its inputs.
        known: Names that `generate` has a meaning for.

    Returns:
        The other arguments; and the images with the types of tokens beside them, on the model's device. Empty inputs,
        such as a processor makes of a text without images, are in neither.

    Raises:
        UnsupportedError: Naming an input that holds something else than images, or images that cannot be taken.
    """
    model = target.model
    inputs = (inspect.signature(model.forward).parameters.keys() | target.image_arguments) - set(known)
    given = {name: value for name, value in arguments.items() if name in inputs and not _is_empty(value)}
    images = {name: value for name, value in given.items() if name in target.image_arguments}
    if images and target.images.ok:
        images |= {name: value for name, value in given.items() if marks_tokens(name, model)}
    for name in sorted(given.keys() - images.keys()):
        _check_empty(name, given[name], model)
    if images and not target.images.ok:
        raise UnsupportedError(f"{target.name} takes no images here: {target.images.reason}; pass text alone")
    others = {name: value for name, value in arguments.items() if name not in inputs}
    return others, {name: to_model(value, target.device) for name, value in images.items()}


def read_prepared(
    prepared: Mapping[str, Any], input_ids: Tensor, seen: Tensor, target: Target
) -> list[ImagePrompt | None]:
    """Return the images of each row, or None for a row without any, among what transformers has prepared.

    Args:
        prepared: Keyword arguments that transformers would give to the model, without the mask.
        input_ids: The prompts, `[B, P]` int64.
        seen: False where a row is padded, `[B, P]` bool.
        target: The model.

    Raises:
        ArgumentError: The images do not fit the prompts.
        UnsupportedError: An input says more than the ids, their mask and images.
    """
    past, positions = prepared.get("past_key_values"), prepared.get("position_ids")
    if past is not None and past.get_seq_length() > 0:
        raise UnsupportedError("past_key_values cannot be continued from; pass the whole text as input_ids")
    images = split_rows(prepared, input_ids, seen, target.model)
    of_images = {"position_ids"}
    if any(images):
        if not target.images.ok:
            raise UnsupportedError(f"{target.name} takes no images here: {target.images.reason}; pass text alone")
        of_images |= {name for row in images if row is not None for name in row.inputs}
    text = torch.tensor([row is None for row in images], device=seen.device)
    if positions is not None and not _are_plain(positions, seen, text):
        raise UnsupportedError("position_ids of your own cannot be honoured; leave them out")
    for name in sorted(prepared.keys() - _LOOP - of_images):
        _check_empty(name, prepared[name], target.model)
    return images


def _check_empty(name: str, value: Any, model: Any) -> None:
    if not (_is_empty(value) or (marks_tokens(name, model) and isinstance(value, Tensor) and not value.any())):
        raise UnsupportedError(f"generate() does not take {name}; {_TAKEN}")


def _are_plain(positions: Tensor, seen: Tensor, rows_of_text: Tensor) -> bool:
    """Tell whether tokens are counted from 0 in each row of text, padding aside.

    Args:
        positions: `[B, P]`, or `[A, B, P]` with one position per axis, which are equal for text; B may be 1 for all.
        seen: `[B, P]` bool.
        rows_of_text: The rows without images, `[B]` bool.
    """
    rows, width = seen.shape
    if positions.dim() not in (2, 3) or positions.shape[-1] != width or positions.shape[-2] not in (1, rows):
        return False
    plain = seen.cumsum(dim=1) - 1  # [B, P]
    return bool(((positions == plain) | ~(seen & rows_of_text[:, None])).all())


def _is_empty(value: Any) -> bool:
    """Tell whether an input holds nothing, as what was encoded of no image does."""
    if isinstance(value, Mapping):
        return all(map(_is_empty, value.values()))
    return value is None or (isinstance(value, list | tuple) and all(map(_is_empty, value)))
