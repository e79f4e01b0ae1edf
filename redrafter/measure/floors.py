"""Compute lower bounds of a step's time: the bytes that it must read, divided by the copy bandwidth."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from redrafter.cache.kv_cache import LayerShape
from redrafter.measure.run import median_ms

CPU_BUFFER_BYTES = 1 << 28
MAX_GPU_BUFFER_BYTES = 1 << 31


@dataclass(frozen=True)
class Bandwidth:
    """Memory bandwidth of a device, measured by copying a buffer that is larger than its caches."""

    bytes_per_second: float  # read plus written
    buffer_bytes: int  # size of the copied buffer

    def ms(self, moved: int) -> float:
        """Return the milliseconds to move `moved` bytes at this bandwidth, a lower bound of a step's time."""
        return 1e3 * moved / self.bytes_per_second


def copy_bandwidth(device: torch.device) -> Bandwidth:
    """Measure a device's bandwidth by copying 256 MiB on a CPU, or up to 2 GiB of free memory on a GPU."""
    size = CPU_BUFFER_BYTES
    if device.type == "cuda":
        # Two buffers must fit next to the model; larger ones than the L2 cache measure the memory itself.
        size = min(MAX_GPU_BUFFER_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
    ms = median_ms(lambda: buffers[1].copy_(buffers[0]), device)
    # Return the memory, which the measured batches need.
    buffers.clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Bandwidth(2 * size / ms * 1e3, size)


def slot_bytes(shapes: Sequence[LayerShape]) -> int:
    """Return the bytes of the keys and values of one token in all layers."""
    return sum(shape.heads * (shape.key_dim + shape.value_dim) * shape.dtype.itemsize for shape in shapes)


def resident_bytes(*modules: nn.Module) -> int:
    """Return the bytes of the storages of parameters and buffers; a shared storage counts once."""
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    # Tied weights share one storage.
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
