"""Attention of packed token trees over a paged cache, as one operator that any Hugging Face model can be given.

All rows of a batch stand one behind the other in a single sequence of `T` tokens, so that a compiler sees one dynamic
length and nothing of the batch. What attention must know beside the queries travels as a `Plan` through the model's own
keyword arguments, and the operator both stores the new keys and values and attends, so the model needs no cache object.
"""

from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor

from redrafter import kernels
from redrafter.blocks import BLOCK

__all__ = ["ATTENTION_NAME", "Plan", "tree_attention", "tree_attention_forward"]

ATTENTION_NAME = "redrafter_tree"  # a name holding "sdpa" or "flash" would make transformers check for those


@dataclass(frozen=True)
class Plan:
    """One forward over the last M of a tree's N nodes, as attention must know it. All flat, each with one spare entry
    at its end, since a compiler treats a dimension that is ever 1 as a case of its own.

    pools: per layer, its keys' pool and index, then its values' pool and index; a pool is `[G, slots, heads, dim]`.
    length: `[B + 1]` int64, committed tokens. depth: `[B*N + 1]` int64. ancestors: `[B*M*N + 1]` bool.
    table: `[B*M + 1]` int32, the blocks of each row in order of position.
    """

    pools: tuple[tuple[Tensor, int, Tensor, int], ...]
    length: Tensor
    depth: Tensor
    ancestors: Tensor
    table: Tensor


# Nothing is declared as mutated, though the pools are written: the only readers of a pool are these operators, which
# stand in order because each layer needs the one before. Declared, the compiler might copy a whole pool.
@torch.library.custom_op("redrafter::tree_attention", mutates_args=())
def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    key_layer: int,
    values: Tensor,
    value_layer: int,
    length: Tensor,
    depth: Tensor,
    ancestors: Tensor,
    table: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Store the new keys and values in the cache, and attend to the committed ones and to each node's ancestors.

    query: `[T, Hq, d]`; key, value: `[T, H, d]`, `[T, H, dv]`; T is B*M, or more with padding at the end, whose output
    is 0. keys, values: the pools. window: positions that a node looks back, 0 for all. softcap: 0 for none. sinks:
    `[Hq]`, a score that each head may spend on nothing, or None. Returns `[T, Hq, dv]`.

    This is the slow reference, for any device; on a GPU a Triton kernel stands in its place.
    """
    rows = length.shape[0] - 1
    nodes = (depth.shape[0] - 1) // rows
    new = (ancestors.shape[0] - 1) // (rows * nodes)
    count, heads = rows * new, key.shape[1]
    table, depth = table[:-1].view(rows, -1).long(), depth[:-1].view(rows, nodes)
    ancestors, length = ancestors[:-1].view(rows, new, nodes), length[:-1]
    at = length[:, None] + torch.arange(nodes - new, nodes, device=length.device)  # [B, M], the scratch slots
    page = table.gather(1, (at // BLOCK).clamp(max=table.shape[1] - 1)).where(at // BLOCK < table.shape[1], 0)
    slots = (page * BLOCK + at % BLOCK).flatten()
    keys[key_layer].index_copy_(0, slots, key[:count])
    values[value_layer].index_copy_(0, slots, value[:count])
    out = query.new_zeros(*query.shape[:2], value.shape[-1])
    for row in range(rows):
        n, own = int(length[row]), slice(row * new, (row + 1) * new)
        before = torch.arange(n + nodes - new, device=length.device)
        page = table[row].gather(0, (before // BLOCK).clamp(max=table.shape[1] - 1))
        slots = page.where(before // BLOCK < table.shape[1], 0) * BLOCK + before % BLOCK
        k, v = torch.cat([keys[key_layer][slots], key[own]]), torch.cat([values[value_layer][slots], value[own]])
        k, v = (repeat(x, "s h d -> s (h g) d", g=query.shape[1] // heads).float() for x in (k, v))
        scores = torch.einsum("nhd,shd->hns", query[own].float(), k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        seen = torch.cat([ancestors.new_ones(new, n), ancestors[row]], dim=1)  # [M, n + N]
        if window:
            position = torch.cat([before[:n], n + depth[row]])
            seen = seen & (n + depth[row][-new:, None] - position < window)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, repeat(sinks.float(), "h -> h n 1", n=new)], dim=-1)
        weights = scores.softmax(-1)[..., : n + nodes]
        out[own] = torch.einsum("hns,shd->nhd", weights, v).to(out.dtype)
    return out


@tree_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[-1])


if kernels.TRITON:
    tree_attention.register_kernel("cuda")(kernels.tree_attention)


def tree_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    plan: Plan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """For transformers: query `[1, Hq, T, d]`; key, value `[1, H, T, d]`. Returns `[1, T, Hq, dv]`."""
    query, key, value = (rearrange(x, "1 h t d -> t h d") for x in (query, key, value))
    out = tree_attention(
        query,
        key,
        value,
        *plan.pools[module.layer_idx],
        plan.length,
        plan.depth,
        plan.ancestors,
        plan.table,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window or 0,
        softcap or 0.0,
        s_aux,
    )
    return out[None], None
