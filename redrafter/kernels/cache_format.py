"""Keys and values in the number format of a cache, which may be FP8 where a forward computes in a wider one.

Each number is rounded separately, so the stored values of a token do not depend on how the token was read. Numbers out
of range are clamped: not every version of torch converts so, and an infinity would make a whole sequence invalid.
"""

import torch
from torch import Tensor


def largest_number(dtype: torch.dtype) -> float:
    """Return the largest number of an FP8 format, and 0 for a wider one, in which a cache stores numbers unchanged.

    Args:
        dtype: Dtype of a cache.
    """
    return torch.finfo(dtype).max if dtype.itemsize == 1 else 0.0


def to_format(states: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys or values in the storage format of a cache."""
    largest = largest_number(dtype)
    # Before the conversion, which in some versions of torch turns numbers out of range into infinities or NaN.
    return states.clamp(-largest, largest).to(dtype) if largest else states


def round_trip(states: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys or values, in their own dtype, with the rounding of a cache of dtype `dtype`."""
    return to_format(states, dtype).to(states.dtype)


def as_bytes(store: Tensor) -> Tensor:
    """Return a view of a tensor whose numbers can be moved, as not every operator supports FP8."""
    return store.view(torch.uint8) if store.element_size() == 1 else store


def write_slots(store: Tensor, slots: Tensor, states: Tensor) -> None:
    """Store keys or values in a layer's part of a cache.

    Args:
        store: The layer's part, `[slots, H, d]`; written in place.
        slots: The slots to write, `[T]` int64.
        states: Keys or values, `[T, H, d]`.
    """
    if store.element_size() == 1:
        store, states = as_bytes(store), as_bytes(to_format(states, store.dtype))
    store.index_copy_(0, slots, states)


def read_slots(store: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the keys or values in slots, in the dtype of a forward.

    Args:
        store: The layer's part of a cache, `[slots, H, d]`.
        slots: The slots to read, `[...]` int64.
        dtype: Dtype of the forward.

    Returns:
        `[..., H, d]`.
    """
    # On a CPU, indexing copies single numbers where index_select copies whole slots, five times as fast.
    if store.element_size() > 1:
        return store.index_select(0, slots.flatten()).unflatten(0, slots.shape)
    return as_bytes(store).index_select(0, slots.flatten()).view(store.dtype).unflatten(0, slots.shape).to(dtype)
