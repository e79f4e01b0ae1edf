"""Bytes that a step cannot do without. Divided by the copy bandwidth they are the time that nothing can beat."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from redrafter.cache.dense import LayerShape
from redrafter.drafting.drafter import RecurrentDrafter

__all__ = ["draft_bytes", "forward_bytes", "resident_bytes", "slot_bytes"]


def forward_bytes(model: Any) -> int:
    """Weights that one forward reads: all but the embedding table, of which it reads a few rows, unless that is the
    head too. Of a mixture of experts it reads fewer."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    skipped = set() if tied else set(map(id, embedding.parameters()))
    return sum(weight.nbytes for weight in model.parameters() if id(weight) not in skipped)


def draft_bytes(drafter: RecurrentDrafter, depth: int) -> int:
    """Weights that `depth` search steps read. What fuses the target's layers is read once. At the first step the
    published recurrence has no state to multiply `rnn_u` with."""
    fused = 0 if drafter.fuse is None else sum(weight.nbytes for weight in drafter.fuse.parameters())
    whole = sum(weight.nbytes for weight in drafter.parameters()) - fused
    saved = -fused
    if drafter.config.rnn and drafter.config.recurrence != "gated":
        weight, bias = drafter.rnn_u.weight, drafter.rnn_u.bias
        saved += weight.nbytes + (bias.nbytes if drafter.config.recurrence == "trtllm" else 0)
    return depth * whole - saved


def slot_bytes(shapes: Sequence[LayerShape]) -> int:
    """Keys and values of one token."""
    return sum(shape.heads * (shape.key_dim + shape.value_dim) * shape.dtype.itemsize for shape in shapes)


def resident_bytes(*modules: nn.Module) -> int:
    """Memory behind parameters and buffers, what several share counted once."""
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
