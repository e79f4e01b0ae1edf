"""What a drafter reads of a target: hidden states of several depths, and keys and values that are stored for it.

Reading the outputs of earlier layers beside the last hidden state is how EAGLE-3 feeds its head (Li et al. 2025, arXiv
2503.01840).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from redrafter.cache.kv_cache import KVCache, LayerShape
from redrafter.errors import MismatchError, UnsupportedError


def decoder_layers(model: PreTrainedModel, count: int, layer_ids: Sequence[int]) -> list[nn.Module]:
    """Return those of a causal LM's `count` decoder layers that have these numbers, from 0.

    Raises:
        MismatchError: There is no such layer.
        UnsupportedError: The model does not hold its layers in a list.
    """
    for index in layer_ids:
        if not 0 <= index < count:
            raise MismatchError(
                f"the drafter reads layer {index}; {type(model).__name__} has {count} layers, from 0 to {count - 1}"
            )
    if not layer_ids:
        return []
    stack = decoder_stack(model, count)
    if stack is None:
        raise UnsupportedError(
            f"{type(model).__name__} does not hold its {count} layers in a list, so a drafter cannot read them; "
            "train one with --target-layers none"
        )
    return [stack[index] for index in layer_ids]


def decoder_stack(model: PreTrainedModel, count: int) -> nn.ModuleList | None:
    """Return the list of a model's `count` decoder layers, or None where it does not hold them in a list."""
    decoder: nn.Module = model.get_decoder()  # an encoder of images or sound may have as many layers
    lists = (module for module in decoder.modules() if isinstance(module, nn.ModuleList))
    return next((layers for layers in lists if len(layers) == count), None)


def join_hidden(last: Tensor, outputs: Sequence[Tensor]) -> Tensor:
    """Concatenate the last hidden state and the outputs of L earlier layers, `[..., D]` each, to what a drafter reads.

    That is `[..., F]` with F = (1 + L) * D, in the dtype and on the device of `last`.

    Raises:
        UnsupportedError: A layer's output has another rank or width than the last hidden state.
    """
    for output in outputs:
        if output.dim() != last.dim() or output.shape[-1] != last.shape[-1]:
            raise UnsupportedError(
                f"a layer's output has the shape {list(output.shape)} and the last hidden state {list(last.shape)}: a "
                "drafter cannot read them together; train one with --target-layers none"
            )
    return torch.cat([last, *(x.to(last) for x in outputs)], dim=-1) if outputs else last


@dataclass(frozen=True)
class DrafterLayer:
    """Keys and values that a drafter stores of every token that the target reads.

    They are a layer after the target's own in each cache. So whatever the cache does with a text's keys and values, the
    drafter's go along: blocks, prefixes that are found again, rows that move, paths of a tree that are committed.

    Attributes:
        owner: The drafter.
        shape: What it stores of a token.
        remember: Computes keys and values `[T, H, d]` of tokens, from their ids `[T]`, their positions `[T]` and the
            hidden states that the drafter reads, `[T, F]`.
    """

    owner: object
    shape: LayerShape
    remember: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

    def write(self, cache: KVCache, slots: Tensor, ids: Tensor, positions: Tensor, hidden: Tensor) -> None:
        """Store the keys and values of tokens, whose hidden states are `[T, F]`, in slots `[T]` of a cache's pools."""
        if not cache.has_drafter_layer:
            return  # it was made before the drafter was loaded
        for store, states in zip(cache.stores(-1), self.remember(ids, positions, hidden), strict=True):
            # A NaN would stay in the cache, and no mask hides one from the drafter. What it reads changes no text.
            store.index_copy_(0, slots, states.nan_to_num(0, 0, 0))
