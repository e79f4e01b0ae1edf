"""transformers' own cache, of keys and values as a paged cache stores them."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from redrafter.kernels.cache_format import round_trip

__all__ = ["RoundingCache"]


class RoundingCache(DynamicCache):
    """A cache for a forward of the model's own, whose keys and values are rounded before anything attends to them."""

    def __init__(self, dtype: torch.dtype):
        """Begin without tokens.

        Args:
            dtype: Format in which keys and values will be stored.
        """
        super().__init__()
        self._dtype = dtype

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep new keys and values of a layer, rounded, and return all that it has; as `Cache.update`."""
        key_states, value_states = (round_trip(x, self._dtype) for x in (key_states, value_states))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)
