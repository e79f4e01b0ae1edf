"""Checks of a prompt: its shape, ids, mask and length."""

from typing import Any

import torch
from torch import Tensor

from redrafter.engine.options import EngineOptions
from redrafter.errors import ArgumentError
from redrafter.target.target import Target

__all__ = ["check_ids", "check_length", "check_shapes", "read_mask"]


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
    """Raise `ArgumentError` where the longest prompt leaves no room to write.

    Args:
        longest: Tokens of the longest prompt.
        context: Tokens of the target's context; None where it has no end.
        options: Limits of lengths.
    """
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
