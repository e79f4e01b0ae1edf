"""Launch options of the kernels that depend on the device."""

import functools

import torch

__all__ = ["supports_dependent_launch"]


@functools.cache
def supports_dependent_launch(device: torch.device) -> bool:
    """Return whether a kernel can be launched before the previous one is done, and wait for it on the device.

    This is programmatic dependent launch, which GPUs have from Hopper on.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
