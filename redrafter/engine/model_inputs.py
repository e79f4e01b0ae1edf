"""What a model may be given beside the ids and their mask.

Models with an encoder beside their text get a word about its inputs in every call, from transformers' `generate` or
from a processor, and some get a position for each axis of an image. For text alone, all of it says what ids and mask
say already. Anything more is refused by name.
"""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from redrafter.errors import UnsupportedError

__all__ = ["check_prepared", "without_empty_inputs"]

# How transformers runs its own loop. This library's loop does without.
_LOOP = frozenset({"past_key_values", "use_cache", "cache_position", "logits_to_keep"})


def without_empty_inputs(arguments: Mapping[str, Any], model: Any, known: Collection[str]) -> dict[str, Any]:
    """Leave out the inputs of a model that say nothing, as a processor makes them of a text without images.

    Args:
        arguments: keyword arguments of a call of `generate`.
        model: the Hugging Face model, whose forward names its inputs.
        known: names that `generate` has a meaning for.

    Raises:
        UnsupportedError: naming an input that holds something.
    """
    inputs = inspect.signature(model.forward).parameters.keys() - known
    for name in sorted(arguments.keys() & inputs):
        _check_empty(name, arguments[name], model)
    return {name: value for name, value in arguments.items() if name not in inputs}


def check_prepared(prepared: Mapping[str, Any], seen: Tensor, model: Any) -> None:
    """Raise `UnsupportedError` where a prepared input says more than the ids and their mask.

    Args:
        prepared: keyword arguments that transformers would give to the model, the mask apart.
        seen: `[B, P]` bool, False where a row is padded.
        model: the Hugging Face model.
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
        positions: `[B, P]`, or `[A, B, P]` with one position per axis, which for text are equal; B may be 1 for all.
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
