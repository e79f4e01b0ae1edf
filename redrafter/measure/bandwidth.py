"""The memory bandwidth of a device, measured by copying: what the time of a step is held against."""

from dataclasses import dataclass

import torch

from redrafter.measure.stopwatch import median_ms

__all__ = ["Bandwidth", "copy_bandwidth"]

CPU_BUFFER_BYTES = 1 << 28
MAX_GPU_BUFFER_BYTES = 1 << 31


@dataclass(frozen=True)
class Bandwidth:
    """Memory bandwidth of a device, measured by copying a buffer that is larger than its caches.

    Attributes:
        bytes_per_second: Bytes read plus bytes written, per second.
        buffer_bytes: Size of the buffer that was copied.
    """

    bytes_per_second: float
    buffer_bytes: int

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
