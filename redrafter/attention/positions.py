"""Tell positions to attention code that takes them from the cache.

Some architectures of transformers take a token's position from its slot: GPT-Neo masks by slot, Llama-4 scales queries
by the length of the cache, and those with ALiBi add a bias to each slot (`alibi.py`). In a tree, slots and positions
differ, and rows of a batch have lengths of their own. While a forward runs, stand-ins on those attention modules answer
by position; afterwards the model is as it was.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from redrafter.attention.alibi import bias_by_position, has_alibi
from redrafter.attention.mask import AttentionKind, TreeSlots

__all__ = ["answer_by_position", "find_slot_readers", "masks_slots"]

Positions: TypeAlias = Callable[[], Tensor]
"""Returns the positions of new nodes, `[B, M]` int64; a compiled forward has others each time."""


def find_slot_readers(model: nn.Module) -> list[Any]:
    """Return the attention modules of a model that take positions from the cache."""
    return [module for module in model.modules() if type(module).__name__ in _STAND_INS or has_alibi(module)]


def masks_slots(modules: Sequence[Any]) -> bool:
    """Tell whether any of these slot readers masks slots, or biases them, so that no attention can take its place."""
    return any(_STAND_INS.get(type(module).__name__) is not _scale_by_position for module in modules)


@contextmanager
def answer_by_position(modules: Sequence[Any], positions: Positions, slots: TreeSlots | None = None) -> Iterator[None]:
    """Let attention modules that take positions from the cache be given true positions inside the context.

    Args:
        modules: The modules that `find_slot_readers` found.
        positions: Returns the positions of the new nodes.
        slots: The slots that the forward reads; None where attention is ours and needs no mask.
    """
    with ExitStack() as stack:
        for module in modules:
            if has_alibi(module):
                assert slots is not None, "attention with ALiBi cannot be replaced"
                stack.enter_context(bias_by_position(module, slots))
            else:
                stack.enter_context(_STAND_INS[type(module).__name__](module, positions, slots))
        yield


class _SlotMask:
    """A stand-in for GPT-Neo's mask `[1, 1, context, context]` that gives the tree's mask for any part of it."""

    def __init__(self, mask: Tensor):
        self._mask = mask

    def __getitem__(self, _: Any) -> Tensor:
        return self._mask


@contextmanager
def _mask_by_position(module: Any, positions: Positions, slots: TreeSlots | None) -> Iterator[None]:
    """Let a GPT-Neo layer mask by position; a local one looks back `window_size` positions."""
    assert slots is not None, "GPT-Neo's attention cannot be replaced"
    window = module.config.window_size if module.attention_type == "local" else None
    buffers, mask = module._buffers, module._buffers["bias"]
    buffers["bias"] = _SlotMask(slots.seen(AttentionKind(window=window))[:, None].to(mask.device))
    try:
        yield
    finally:
        buffers["bias"] = mask


@contextmanager
def _scale_by_position(module: Any, positions: Positions, slots: TreeSlots | None) -> Iterator[None]:
    """Make a Llama-4 layer scale its queries by the true position of each token inside the context.

    Llama-4 scales the queries of layers without rope by a factor that grows with the position (temperature tuning,
    arXiv 2501.19399), and counts positions by the length of the cache, which is wrong in a tree. Inside the context the
    layer's own scaling is off, and a hook on its query projection scales instead. Layers with rope, and models without
    the tuning, stay as they are.

    Args:
        module: A `Llama4TextAttention`; changed inside the context.
        positions: Returns the positions of the new nodes.
        slots: Not used; it is there because all stand-ins are called with the same arguments.
    """
    if module.use_rope or not module.attn_temperature_tuning:
        yield
        return

    def scale(_: nn.Module, __: Any, queries: Tensor) -> Tensor:
        steps = torch.floor((positions().to(queries.device).float() + 1) / module.floor_scale)  # [B, M]
        scales = torch.log1p(steps) * module.attn_scale + 1
        return (queries * scales[..., None]).to(queries.dtype)

    tuning = module.attn_temperature_tuning
    module.attn_temperature_tuning = False
    hook = module.q_proj.register_forward_hook(scale)
    try:
        yield
    finally:
        hook.remove()
        module.attn_temperature_tuning = tuning


_STAND_INS: dict[str, Callable[[Any, Positions, TreeSlots | None], Any]] = {
    "GPTNeoSelfAttention": _mask_by_position,
    "Llama4TextAttention": _scale_by_position,
}
