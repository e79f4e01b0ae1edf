"""Tell positions to attention code that takes them from the cache.

Some architectures of transformers take a token's position from its slot: GPT-Neo masks by slot, Llama-4 scales queries
by the length of the cache, and those with ALiBi (Press et al. 2022) add to each score a number that falls with the
distance of the key's slot. In a tree, slots and positions differ, and rows of a batch have lengths of their own. So
those attention modules are patched to answer by position.

transformers makes the biases of ALiBi by a mask `[B, S]` of padding, and no tree fits into one. So the model is given
such a mask, without padding, and what its attention modules are then handed is replaced: the bias of a slot by that of
its position, and the mask by the tree's.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from redrafter.attention.mask import AttentionKind, TreeSlots, additive_mask
from redrafter.model.patch import ModelPatch

Arguments: TypeAlias = Mapping[str, Any]
Positions: TypeAlias = Callable[[], Tensor]
"""Returns the positions of new nodes, `[B, M]` int64; a compiled forward has others each time."""


def find_slot_readers(model: nn.Module) -> list[Any]:
    """Return the attention modules of a model that take positions from the cache."""
    return [module for module in model.modules() if type(module).__name__ in _PATCHES or has_alibi(module)]


def masks_slots(modules: Sequence[Any]) -> bool:
    """Tell whether any of these slot readers masks slots, or biases them, so that no attention can take its place."""
    return any(_PATCHES.get(type(module).__name__) is not _scale_by_position for module in modules)


def has_alibi(module: nn.Module) -> bool:
    """Tell whether a module is an attention with ALiBi whose biases can be replaced."""
    name, config = type(module).__name__, getattr(module, "config", None)
    return name in _BIASES and (name != "FalconAttention" or bool(getattr(config, "alibi", False)))


def answer_by_position(
    patch: ModelPatch, modules: Sequence[Any], positions: Positions, slots: TreeSlots | None = None
) -> None:
    """Let attention modules that take positions from the cache be given true positions.

    Args:
        patch: The patch of the forward.
        modules: The modules that `find_slot_readers` found.
        positions: Returns the positions of the new nodes.
        slots: The slots that the forward reads; None where attention is ours and needs no mask.
    """
    for module in modules:
        (_bias_by_position if has_alibi(module) else _PATCHES[type(module).__name__])(patch, module, positions, slots)


class _Whole:
    """A stand-in for a table over all slots that gives the same part of it whatever is asked for."""

    def __init__(self, table: Tensor, part: Tensor):
        self.shape, self.size, self._part = table.shape, table.size, part

    def __getitem__(self, _: Any) -> Tensor:
        return self._part


def _mask_by_position(patch: ModelPatch, module: Any, positions: Positions, slots: TreeSlots | None) -> None:
    """Let a GPT-Neo layer mask by position; a local one looks back `window_size` positions."""
    assert slots is not None, "GPT-Neo's attention cannot be replaced"
    window = module.config.window_size if module.attention_type == "local" else None
    mask = module._buffers["bias"]  # [1, 1, context, context]
    seen = slots.seen(AttentionKind(window=window))[:, None].to(mask.device)
    patch.put(module._buffers, "bias", _Whole(mask, seen))


def _scale_by_position(patch: ModelPatch, module: Any, positions: Positions, slots: TreeSlots | None) -> None:
    """Make a Llama-4 layer scale its queries by the true position of each token.

    Llama-4 scales the queries of layers without rope by a factor that grows with the position (temperature tuning,
    arXiv 2501.19399), and counts positions by the length of the cache, which is wrong in a tree. So the layer's own
    scaling is off, and a hook on its query projection scales instead. Layers with rope, and models without the tuning,
    stay as they are.
    """
    if module.use_rope or not module.attn_temperature_tuning:
        return

    def scale(_: nn.Module, __: Any, queries: Tensor) -> Tensor:
        steps = torch.floor((positions().to(queries.device).float() + 1) / module.floor_scale)  # [B, M]
        scales = torch.log1p(steps) * module.attn_scale + 1
        return (queries * scales[..., None]).to(queries.dtype)

    patch.put(vars(module), "attn_temperature_tuning", False)
    patch.hook(module.q_proj, scale)


def _bias_by_position(patch: ModelPatch, module: Any, positions: Positions, slots: TreeSlots | None) -> None:
    """Let an attention module with ALiBi, of a model that is given a mask of ones, add the bias of each position."""
    assert slots is not None, "attention with ALiBi cannot be replaced"
    biases = _BIASES[type(module).__name__]

    def hook(attention: Any, args: tuple[Any, ...], given: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**given, **biases(attention, given, slots)}

    patch.hook(module, hook, before=True, with_kwargs=True)


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
    return {"position_bias": _Whole(table, bias), "attention_mask": ~_seen(slots, table.device)[:, None]}


_PATCHES: dict[str, Callable[[ModelPatch, Any, Positions, TreeSlots | None], None]] = {
    "GPTNeoSelfAttention": _mask_by_position,
    "Llama4TextAttention": _scale_by_position,
}
_BIASES: dict[str, Callable[[Any, Arguments, TreeSlots], Arguments]] = {
    "BloomAttention": _bloom,
    "FalconAttention": _falcon,
    "MptAttention": _mpt,
}
