"""How kernels are launched."""

import functools

import torch

__all__ = ["follows_closely"]


@functools.cache
def follows_closely(device: torch.device) -> bool:
    """Whether a kernel may be launched before the one in front of it is done, to wait for it on the device itself
    (programmatic dependent launch, from Hopper on)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
