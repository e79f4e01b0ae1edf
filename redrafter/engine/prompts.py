"""What a call gives to read: ids and mask, which are checked, and inputs of a model beside them.

Models with an encoder beside their text are told about its inputs in every call, from transformers' `generate` or
from a processor, and some get a position for each axis of an image. For text alone, all of it says what ids and mask
say already. Images are taken by models that can be given what was encoded of them; anything more is refused by name.
"""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from redrafter.engine.options import EngineOptions
from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.model.images import ImagePrompt, marks_tokens, split_rows, to_model
from redrafter.model.target import Target


def check_shapes(input_ids: Any, mask: Any) -> None:
    """Raise `ArgumentError` unless the ids are integers `[B, P]`, at least one, and the mask has their shape."""
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(f"input_ids must be an integer tensor [batch, length], got {_shown(input_ids)}")
    if input_ids.numel() == 0:
        raise ArgumentError(f"the prompt is empty: input_ids has shape {tuple(input_ids.shape)}")
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != input_ids.shape):
        raise ArgumentError(
            f"attention_mask must have the shape of input_ids, {tuple(input_ids.shape)}, got {_shown(mask)}"
        )


def check_ids(input_ids: Tensor, target: Target) -> None:
    """Raise `ArgumentError` where an id is not in the target's vocabulary."""
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= target.vocab_size:
        bad = low if low < 0 else high
        raise ArgumentError(f"token id {bad} is out of range: the target's vocabulary has {target.vocab_size} ids")


def check_length(longest: int, context: int | None, options: EngineOptions) -> None:
    """Raise `ArgumentError` where the longest prompt leaves no room to write in `context` tokens; None for no end."""
    if context is not None and longest >= context:
        raise ArgumentError(
            f"the prompt has {longest} tokens and the target's context is {context}: no room is left to write; "
            "shorten the prompt"
        )
    if options.max_input_len is not None and longest > options.max_input_len:
        raise ArgumentError(
            f"the prompt has {longest} tokens and max_input_len is {options.max_input_len}: shorten it, or raise that"
        )
    if options.max_seq_len is not None and longest >= options.max_seq_len:
        raise ArgumentError(
            f"the prompt has {longest} tokens and max_seq_len is {options.max_seq_len}: no room is left to write; "
            "shorten it, or raise that"
        )


def read_mask(mask: Tensor | None, input_ids: Tensor) -> Tensor:
    """Return where tokens are, `[B, P]` bool; `ArgumentError` unless each row is left-padded and has a token."""
    if mask is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    seen = mask.bool()
    if not bool(seen.any(dim=1).all()):
        raise ArgumentError(f"row {int((~seen.any(dim=1)).nonzero()[0])} of attention_mask has no token: empty prompt")
    if bool((seen[:, :-1] & ~seen[:, 1:]).any()):
        raise ArgumentError("attention_mask is not left-padded; set tokenizer.padding_side = 'left'")
    return seen


def _shown(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


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

    Positions are `[B, P]`, or `[A, B, P]` with one position per axis, which are equal for text; B may be 1 for all.
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
