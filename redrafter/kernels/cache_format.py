"""Keys and values in the number format of a cache, which may be FP8 where a forward computes in a wider one.

A number is rounded by itself, so what is stored of a token does not depend on how the token was read. Numbers out of
range become the largest ones: not every version of torch converts so, and an infinity would spoil a whole text.
"""

import torch
from torch import Tensor


def largest_number(dtype: torch.dtype) -> float:
    """Return the largest number of an FP8 format, and 0 for a wider one, in which a cache stores numbers as they are.

    Args:
        dtype: Dtype of a cache.
    """
    return torch.finfo(dtype).max if dtype.itemsize == 1 else 0.0


def to_format(states: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys or values as a cache of that dtype stores them."""
    largest = largest_number(dtype)
    # Before the conversion, which in some versions of torch makes infinities or NaN of numbers out of range.
    return states.clamp(-largest, largest).to(dtype) if largest else states


def round_trip(states: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys or values, in their own dtype, as they are read back from a cache of dtype `dtype`."""
    return to_format(states, dtype).to(states.dtype)


def as_bytes(store: Tensor) -> Tensor:
    """Return a view of a tensor in which its numbers can be moved: not every operator knows FP8."""
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
    """Return keys or values of slots, as a forward computes with them.

    Args:
        store: The layer's part of a cache, `[slots, H, d]`.
        slots: The slots to read, `[...]` int64.
        dtype: Dtype of the forward.

    Returns:
        `[..., H, d]`.
    """
    # On a CPU, indexing copies number by number where index_select copies slot by slot, five times as fast.
    if store.element_size() > 1:
        return store.index_select(0, slots.flatten()).unflatten(0, slots.shape)
    return as_bytes(store).index_select(0, slots.flatten()).view(store.dtype).unflatten(0, slots.shape).to(dtype)
