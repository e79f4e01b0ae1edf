"""A layer of keys and values that a drafter stores of every token that the target reads.

It stands behind the target's own layers in each cache. So whatever the cache does with a text's keys and values, the
drafter's go along: blocks, prefixes that are found again, rows that move, paths of a tree that are committed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from redrafter.cache.dense import LayerShape
from redrafter.cache.paged import KVCache

__all__ = ["DrafterLayer"]


@dataclass(frozen=True)
class DrafterLayer:
    """Keys and values that a drafter stores of every token.

    Attributes:
        owner: The drafter.
        shape: What it stores of a token.
        remember: Computes keys and values `[T, H, d]` of tokens, from their ids `[T]`, their positions `[T]` and the
            hidden states that the drafter reads, `[T, F]`.
    """

    owner: object
    shape: LayerShape
    remember: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

    def write(self, cache: KVCache, slots: Tensor, ids: Tensor, positions: Tensor, hidden: Tensor) -> None:
        """Store the keys and values of T tokens, in a cache that has a layer for them.

        Args:
            cache: The cache of the tokens' texts.
            slots: Slots of the tokens in its pools, `[T]` int64.
            ids: The tokens, `[T]` int64.
            positions: Their positions, `[T]` int64.
            hidden: Hidden states that the drafter reads, `[T, F]`.
        """
        if not cache.has_drafter_layer:
            return  # a cache that was made before the drafter was loaded has no place for them
        for store, states in zip(cache.drafter_stores(), self.remember(ids, positions, hidden), strict=True):
            # A NaN would stay in the cache, and no mask hides one from the drafter. What it reads changes no text.
            store.index_copy_(0, slots, states.nan_to_num(0, 0, 0))
