"""The bytes that a step must read: divided by the copy bandwidth, they are the least time that it can take."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from redrafter.cache.dense import LayerShape
from redrafter.drafting.drafter_types import Drafter
from redrafter.drafting.eagle import EagleDrafter
from redrafter.measure.run import median_ms

CPU_BUFFER_BYTES = 1 << 28
MAX_GPU_BUFFER_BYTES = 1 << 31


@dataclass(frozen=True)
class Bandwidth:
    """Memory bandwidth of a device, measured by copying a buffer that is larger than its caches."""

    bytes_per_second: float  # read plus written
    buffer_bytes: int  # of what was copied

    def ms(self, moved: int) -> float:
        """Return the milliseconds that moving `moved` bytes takes at this bandwidth, which no step can beat."""
        return 1e3 * moved / self.bytes_per_second


def copy_bandwidth(device: torch.device) -> Bandwidth:
    """Measure a device's bandwidth by copying 256 MiB on a CPU, or up to 2 GiB of what is free on a GPU."""
    size = CPU_BUFFER_BYTES
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        size = min(MAX_GPU_BUFFER_BYTES, free // 4)
    ms = _copy_ms(size, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Bandwidth(2 * size / ms * 1e3, size)


def _copy_ms(size: int, device: torch.device) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return median_ms(lambda: target.copy_(source), device)


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
    context = drafter.context
    never = 0 if context is None else _layer_bytes(context.key) + _layer_bytes(context.value)
    elman = config.rnn and not gated
    unread = _layer_bytes(drafter.rnn_u, with_bias=config.recurrence == "trtllm") if elman else 0
    whole = sum(weight.nbytes for weight in drafter.parameters()) - never
    return depth * (whole - once) + once - unread


def _layer_bytes(layer: nn.Linear, share: float = 1, *, with_bias: bool = True) -> int:
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
