"""Put keys and values that were computed elsewhere into a cache."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from redrafter.cache.dense import DenseCache
from redrafter.cache.paged import KVCache
from redrafter.kernels.cache_format import write_slots

__all__ = ["fill_first_slots"]


def fill_first_slots(cache: KVCache, states: Iterable[tuple[int, Sequence[Tensor]]]) -> None:
    """Put keys and values into the first slots of a cache's only row.

    Args:
        cache: The cache of one row, with as many slots.
        states: Layers that store something, each with the keys and values of P tokens, `[1, heads, P, dim]`, and
            behind them, on a dense cache, the keys of an indexer, `[1, P, dim]`, of a layer that has one.
    """
    for layer, (keys, values, *index_keys) in states:
        count = keys.shape[2]
        if isinstance(cache, DenseCache):
            cache.write_after(torch.zeros(1, dtype=torch.long, device=keys.device), count)
            cache.update(keys, values, layer)
            if index_keys:
                cache.update_indexer(index_keys[0], layer)
            continue
        slots = cache.slots(torch.arange(count, device=keys.device)[None])
        pools = cache.pool.layer_pools[layer]
        assert pools is not None, "a layer that stores something has a pool"
        keys_pool, k, values_pool, v = pools
        write_slots(keys_pool[k], slots, keys[0].transpose(0, 1))
        write_slots(values_pool[v], slots, values[0].transpose(0, 1))
