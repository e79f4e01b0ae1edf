"""Biases of ALiBi (Press et al. 2022) in token trees: they follow from a token's position, not from its slot.

An attention with ALiBi adds to each score a number that falls with the distance of the key. transformers makes these
numbers of slots, by a mask `[B, S]` of padding, and no tree fits into one. So the model is given such a mask, without
padding, and what its attention modules are then handed is replaced: the bias of a slot by that of its position, and the
mask by the tree's.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from redrafter.attention.mask import AttentionKind, TreeSlots, additive_mask
from redrafter.attention.own_thread import only_in_this_thread

__all__ = ["bias_by_position", "has_alibi"]

Arguments = Mapping[str, Any]


def has_alibi(module: nn.Module) -> bool:
    """Tell whether a module is an attention with ALiBi whose biases can be replaced."""
    name, config = type(module).__name__, getattr(module, "config", None)
    return name in _REPLACE and (name != "FalconAttention" or bool(getattr(config, "alibi", False)))


@contextmanager
def bias_by_position(module: nn.Module, slots: TreeSlots) -> Iterator[None]:
    """Let an attention module with ALiBi add the bias of each slot's position inside the context.

    Args:
        module: The attention module, of a model that is given a mask `[B, S]` of ones.
        slots: The slots that its forward reads.
    """
    replace = _REPLACE[type(module).__name__]

    def hook(attention: Any, args: tuple[Any, ...], given: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**given, **replace(attention, given, slots)}

    handle = module.register_forward_pre_hook(only_in_this_thread(hook), with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _of_positions(alibi: Tensor, slots: TreeSlots) -> Tensor:
    """Return biases of positions, made of those of slots, which are a row's positions 0 to S - 1.

    Args:
        alibi: Biases, `[B * H, 1, S]` or `[B, H, 1, S]`, which is the result's shape too.
        slots: The slots.
    """
    by_row = alibi.view(len(slots.length), -1, 1, slots.count)  # [B, H, 1, S]
    index = slots.positions.clamp(max=slots.count - 1).to(alibi.device)
    return by_row.gather(-1, index[:, None, None].expand_as(by_row)).view_as(alibi)


def _seen(slots: TreeSlots, device: torch.device) -> Tensor:
    return slots.seen(AttentionKind()).to(device)


def _bloom(_: Any, given: Arguments, slots: TreeSlots) -> Arguments:
    """Return the biases and the additive mask of a BLOOM layer."""
    alibi = given["alibi"]
    mask = additive_mask(_seen(slots, alibi.device), alibi.dtype)
    return {"alibi": _of_positions(alibi, slots), "attention_mask": mask}


def _falcon(module: Any, given: Arguments, slots: TreeSlots) -> Arguments:
    """Return the biases of a Falcon layer, and its mask, which holds them too."""
    alibi = _of_positions(given["alibi"], slots)
    scaled = alibi.view(len(slots.length), -1, 1, slots.count) / math.sqrt(module.head_dim)  # [B, H, 1, S]
    unseen = ~_seen(slots, alibi.device)[:, None]
    return {"alibi": alibi, "attention_mask": scaled.masked_fill(unseen, torch.finfo(alibi.dtype).min)}


def _mpt(_: Any, given: Arguments, slots: TreeSlots) -> Arguments:
    """Return the biases and the boolean mask of an MPT layer."""
    table = given["position_bias"]  # [H, 1, context], 0 for the last position
    context = table.shape[-1]
    index = (slots.positions + max(context - slots.count, 0)).clamp(max=context - 1).to(table.device)
    bias = table[:, 0, index].transpose(0, 1)[:, :, None]  # [B, H, 1, S]
    return {"position_bias": _SlotBias(table, bias), "attention_mask": ~_seen(slots, table.device)[:, None]}


class _SlotBias:
    """A stand-in for MPT's biases `[H, 1, context]` that gives those of each row for any part of it."""

    def __init__(self, table: Tensor, bias: Tensor):
        self.shape, self.size, self._bias = table.shape, table.size, bias

    def __getitem__(self, _: Any) -> Tensor:
        return self._bias


_REPLACE: dict[str, Callable[[Any, Arguments, TreeSlots], Arguments]] = {
    "BloomAttention": _bloom,
    "FalconAttention": _falcon,
    "MptAttention": _mpt,
}
