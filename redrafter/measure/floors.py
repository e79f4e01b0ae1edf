"""The bytes that a step must read: divided by the copy bandwidth, they are the least time that it can take."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from redrafter.cache.dense import LayerShape
from redrafter.drafting.drafter import RecurrentDrafter

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


def draft_bytes(drafter: RecurrentDrafter, depth: int) -> int:
    """Return the bytes of the weights that a draft of `depth` search steps reads.

    The layer that fuses the target's hidden states is read once. The published recurrence does not read `rnn_u` at the
    first step, where it has no state to multiply with.
    """
    fused = 0 if drafter.fuse is None else sum(weight.nbytes for weight in drafter.fuse.parameters())
    whole = sum(weight.nbytes for weight in drafter.parameters()) - fused
    saved = -fused
    if drafter.config.rnn and drafter.config.recurrence != "gated":
        weight, bias = drafter.rnn_u.weight, drafter.rnn_u.bias
        saved += weight.nbytes + (bias.nbytes if drafter.config.recurrence == "trtllm" else 0)
    return depth * whole - saved


def slot_bytes(shapes: Sequence[LayerShape]) -> int:
    """Return the bytes of the keys and values of one token in all layers."""
    return sum(shape.heads * (shape.key_dim + shape.value_dim) * shape.dtype.itemsize for shape in shapes)


def resident_bytes(*modules: nn.Module) -> int:
    """Return the bytes of memory behind parameters and buffers; a storage that several share counts once."""
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
