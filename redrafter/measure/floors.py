"""The bytes that a step must read: divided by the copy bandwidth, they are the least time that it can take."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from redrafter.cache.dense import LayerShape
from redrafter.drafting.drafter_types import Drafter
from redrafter.drafting.eagle_drafter import EagleDrafter

__all__ = ["draft_bytes", "forward_bytes", "resident_bytes", "slot_bytes"]


def forward_bytes(model: Any) -> int:
    """Return the bytes of the weights that one forward of `model` reads.

    These are all weights but the embedding table, of which a forward reads a few rows, unless the table is also the
    head. For a mixture of experts it is an upper bound, as a forward reads the experts that it chooses.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    skipped = set() if tied else set(map(id, embedding.parameters()))
    return sum(weight.nbytes for weight in model.parameters() if id(weight) not in skipped)


def draft_bytes(drafter: Drafter, depth: int) -> int:
    """Return the bytes of the weights that a draft of `depth` search steps reads.

    What reads the target's hidden state alone is read once (see `RecurrentDrafter.begin`), and what is stored of
    committed tokens is not made here. The published recurrence does not read `rnn_u` at the first step, where it has no
    state to multiply with.
    """
    if isinstance(drafter, EagleDrafter):
        fused = _layer_bytes(drafter.fc)
        table = 0 if drafter.embed_tokens is None else drafter.embed_tokens.weight.nbytes
        return depth * (sum(weight.nbytes for weight in drafter.parameters()) - fused - table) + fused
    config, first = drafter.config, drafter.first_product
    gated = config.rnn and config.recurrence == "gated"
    once = 0 if drafter.fuse is None else _layer_bytes(drafter.fuse)
    once += _layer_bytes(drafter.rnn_gate, 1 / 3) if gated else 0
    once += 0 if first is None else _layer_bytes(first, 1 / 2)
    never = 0
    if drafter.context is not None:
        never = _layer_bytes(drafter.context.key) + _layer_bytes(drafter.context.value)
    unread = 0
    if config.rnn and not gated:
        unread = _layer_bytes(drafter.rnn_u, with_bias=config.recurrence == "trtllm")
    whole = sum(weight.nbytes for weight in drafter.parameters()) - never
    return depth * (whole - once) + once - unread


def _layer_bytes(layer: nn.Linear, share: float = 1, *, with_bias: bool = True) -> int:
    """Return the bytes of a share of a layer's weight, and of its bias."""
    bias = layer.bias.nbytes if with_bias and layer.bias is not None else 0
    return round(layer.weight.nbytes * share) + bias


def slot_bytes(shapes: Sequence[LayerShape]) -> int:
    """Return the bytes of the keys and values of one token in all layers."""
    return sum(shape.heads * (shape.key_dim + shape.value_dim) * shape.dtype.itemsize for shape in shapes)


def resident_bytes(*modules: nn.Module) -> int:
    """Return the bytes of memory behind parameters and buffers; a storage that several share counts once."""
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
