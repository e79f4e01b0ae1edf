"""Engines that store keys and values in another format than that of the activations."""

import torch

from redrafter.errors import UnsupportedError
from redrafter.target.target import Target

__all__ = ["kv_dtype_of", "use_kv_cache_dtype"]

_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_E4M3_CAPABILITY = (8, 9)  # of a GPU; older ones have kernels for e5m2 alone


def kv_dtype_of(name: str) -> torch.dtype | None:
    """Return the format that a name of `KV_CACHE_DTYPES` stands for; None for that of the activations."""
    return _DTYPES.get(name)


def use_kv_cache_dtype(target: Target, draft_model: Target | None, name: str) -> None:
    """Let the models of an engine be decoded on a paged cache, which alone stores keys and values in FP8.

    Args:
        target: The model whose text is wanted.
        draft_model: The model that drafts, or None.
        name: One of `KV_CACHE_DTYPES`.

    Raises:
        UnsupportedError: A model cannot be decoded so, or the GPU has no such format.
    """
    dtype = kv_dtype_of(name)
    if dtype is None:
        return
    if draft_model is not None and draft_model.device != target.device:
        raise UnsupportedError(
            f"kv_cache_dtype={name!r} needs both models on one device: the draft model is on {draft_model.device} and "
            f"the target on {target.device}"
        )
    for model in (target, draft_model or target):
        if reason := model.paged.reason:
            raise UnsupportedError(
                f"kv_cache_dtype={name!r} needs the paged cache, and {model.name} has none: {reason}; leave it out "
                "(--kv-cache-dtype auto)"
            )
    _check_device(target.device, dtype, name)
    for model in (target, draft_model or target):
        if model.device.type == "cpu":
            model.allow_varlen()


def _check_device(device: torch.device, dtype: torch.dtype, name: str) -> None:
    """Raise `UnsupportedError` if kernels for a GPU cannot convert to the format."""
    if device.type != "cuda" or dtype != torch.float8_e4m3fn:
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < _E4M3_CAPABILITY:
        has = ".".join(map(str, capability))
        raise UnsupportedError(
            f"kv_cache_dtype={name!r} needs a GPU of compute capability 8.9 or more, and this one has {has}: take "
            "'fp8_e5m2' (--kv-cache-dtype fp8_e5m2)"
        )
