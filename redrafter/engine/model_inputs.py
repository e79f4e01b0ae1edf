"""Inputs of a model beside the ids and their mask.

Models with an encoder beside their text are told about its inputs in every call, from transformers' `generate` or
from a processor, and some get a position for each axis of an image. For text alone, all of it says what ids and mask
say already. Anything more is refused by name.
"""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from redrafter.errors import UnsupportedError

__all__ = ["check_prepared", "without_empty_inputs"]

# Inputs of the loop in transformers, which this library's loop does not need.
_LOOP = frozenset({"past_key_values", "use_cache", "cache_position", "logits_to_keep"})


def without_empty_inputs(arguments: Mapping[str, Any], model: Any, known: Collection[str]) -> dict[str, Any]:
    """Return the arguments without empty inputs of the model, such as a processor makes of a text without images.

    Args:
        arguments: Keyword arguments of a call of `generate`.
        model: The Hugging Face model, whose forward names its inputs.
        known: Names that `generate` has a meaning for.

    Raises:
        UnsupportedError: Naming an input that holds something.
    """
    inputs = inspect.signature(model.forward).parameters.keys() - known
    for name in sorted(arguments.keys() & inputs):
        _check_empty(name, arguments[name], model)
    return {name: value for name, value in arguments.items() if name not in inputs}


def check_prepared(prepared: Mapping[str, Any], seen: Tensor, model: Any) -> None:
    """Raise `UnsupportedError` where a prepared input says more than the ids and their mask.

    Args:
        prepared: Keyword arguments that transformers would give to the model, without the mask.
        seen: False where a row is padded, `[B, P]` bool.
        model: The Hugging Face model.
    """
    past, positions = prepared.get("past_key_values"), prepared.get("position_ids")
    if past is not None and past.get_seq_length() > 0:
        raise UnsupportedError("past_key_values cannot be continued from; pass the whole text as input_ids")
    if positions is not None and not _are_plain(positions, seen):
        raise UnsupportedError("position_ids of your own cannot be honoured; leave them out")
    for name in sorted(prepared.keys() - _LOOP - {"position_ids"}):
        _check_empty(name, prepared[name], model)


def _check_empty(name: str, value: Any, model: Any) -> None:
    if not (_is_empty(value) or (_marks_tokens(name, model) and isinstance(value, Tensor) and not value.any())):
        raise UnsupportedError(f"generate() does not take {name}; pass text alone, as input_ids and attention_mask")


def _are_plain(positions: Tensor, seen: Tensor) -> bool:
    """Tell whether tokens are counted from 0 in each row, padding aside.

    Args:
        positions: `[B, P]`, or `[A, B, P]` with one position per axis, which are equal for text; B may be 1 for all.
        seen: `[B, P]` bool.
    """
    rows, width = seen.shape
    if positions.dim() not in (2, 3) or positions.shape[-1] != width or positions.shape[-2] not in (1, rows):
        return False
    plain = seen.cumsum(dim=1) - 1  # [B, P]
    return bool(((positions == plain) | ~seen).all())


def _is_empty(value: Any) -> bool:
    """Tell whether an input holds nothing, as what was encoded of no image does."""
    if isinstance(value, Mapping):
        return all(map(_is_empty, value.values()))
    return value is None or (isinstance(value, list | tuple) and all(map(_is_empty, value)))


def _marks_tokens(name: str, model: Any) -> bool:
    """Tell whether 0 in an input of this name marks a token as text, and other numbers as a part of an image."""
    beside = model.config.get_text_config(decoder=True) is not model.config  # GPT-2 embeds its token_type_ids as ids
    return name.endswith("mm_token_type_ids") or (name == "token_type_ids" and beside)
