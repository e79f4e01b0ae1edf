"""Attention of token trees over a paged cache, as one operator that any Hugging Face model can be given.

The new nodes of all rows stand one behind the other in a single sequence of T tokens (varlen), so that a compiler sees
one dynamic length and nothing of the batch. What attention must know beside the queries travels as a `Plan` through the
model's own keyword arguments, and the operator both stores the new keys and values and attends, so the model needs no
cache object.
"""

from functools import partial
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from redrafter import kernels
from redrafter.attention.tree_plan import RUNNING_PLAN, Plan
from redrafter.kernels.block_size import BLOCK_SIZE

__all__ = [
    "ATTENTION_NAME",
    "explicit_attention",
    "gathered_attention",
    "tree_attention",
    "tree_attention_forward",
]

ATTENTION_NAME = "redrafter_tree"  # a name holding "sdpa" or "flash" would make transformers check for those


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

    This is the slow reference, for any device. On a GPU a Triton kernel stands in its place, on a CPU
    `gathered_attention`.

    Args:
        query: Queries of the new nodes, `[T, Hq, d]`; T is B*M, or more with padding at the end, whose output is 0.
        key: Keys of the new nodes, `[T, H, d]`.
        value: Values of the new nodes, `[T, H, dv]`.
        keys: Pool of keys.
        key_layer: Index of the layer in that pool.
        values: Pool of values.
        value_layer: Index of the layer in that pool.
        length: As in `Plan`.
        depth: As in `Plan`.
        ancestors: As in `Plan`.
        table: As in `Plan`.
        scale: Factor of the scores.
        window: Positions that a node looks back, 0 for all.
        softcap: Bound of the scores, 0 for none.
        sinks: Attention sinks, a score that each head may spend on nothing, `[Hq]`; None for none.

    Returns:
        `[T, Hq, dv]`.
    """
    rows = length.shape[0] - 1
    nodes = (depth.shape[0] - 1) // rows
    new = (ancestors.shape[0] - 1) // (rows * nodes)
    count, heads = rows * new, key.shape[1]
    table, depth = table[:-1].view(rows, -1).long(), depth[:-1].view(rows, nodes)
    ancestors, length = ancestors[:-1].view(rows, new, nodes), length[:-1]
    scratch = length[:, None] + torch.arange(nodes - new, nodes, device=length.device)  # [B, M], counted along a row
    block, beyond = scratch // BLOCK_SIZE, scratch // BLOCK_SIZE >= table.shape[1]
    blocks = table.gather(1, block.clamp(max=table.shape[1] - 1)).masked_fill(beyond, 0)
    slots = (blocks * BLOCK_SIZE + scratch % BLOCK_SIZE).flatten()
    keys[key_layer].index_copy_(0, slots, key[:count])
    values[value_layer].index_copy_(0, slots, value[:count])
    out = query.new_zeros(*query.shape[:2], value.shape[-1])
    for row in range(rows):
        n, new_nodes = int(length[row]), slice(row * new, (row + 1) * new)
        before = torch.arange(n + nodes - new, device=length.device)
        blocks = table[row].gather(0, (before // BLOCK_SIZE).clamp(max=table.shape[1] - 1))
        slots = blocks.where(before // BLOCK_SIZE < table.shape[1], 0) * BLOCK_SIZE + before % BLOCK_SIZE
        k = torch.cat([keys[key_layer][slots], key[new_nodes]])
        v = torch.cat([values[value_layer][slots], value[new_nodes]])
        k, v = (repeat(x, "s h d -> s (h g) d", g=query.shape[1] // heads).float() for x in (k, v))
        scores = torch.einsum("nhd,shd->hns", query[new_nodes].float(), k) * scale
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
        out[new_nodes] = torch.einsum("hns,shd->nhd", weights, v).to(out.dtype)
    return out


@tree_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[-1])


if kernels.TRITON:
    tree_attention.register_kernel("cuda")(kernels.tree_attention)


def gathered_attention(
    plan: Plan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    key_layer: int,
    values: Tensor,
    value_layer: int,
    *_: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Compute what `tree_attention` computes, faster on a CPU, with torch's attention over copied keys and values.

    The new keys and values are stored in the pools. Then the keys and values of each row, whose blocks are scattered
    over the pools, are copied into contiguous tensors, and all rows attend to theirs in one call under a mask.

    Arguments of `tree_attention` that are not named here are accepted and ignored: `plan` holds the same tensors.

    Args:
        plan: Lengths, block tables and trees of the rows.
        query: Queries of the new nodes, `[T, Hq, d]`; T may include padding at the end.
        key: Keys of the new nodes, `[T, H, d]`.
        value: Values of the new nodes, `[T, H, dv]`.
        keys: Pool of keys; written in place.
        key_layer: Index of the layer in that pool.
        values: Pool of values; written in place.
        value_layer: Index of the layer in that pool.
        scale: Factor of the scores.
        window: Positions that a node looks back, 0 for all.
        softcap: Bound of the scores, 0 for none.
        sinks: Attention sinks, a score that each head may spend on nothing, `[Hq]`; None for none.

    Returns:
        The attention output of each new node, `[T, Hq, dv]`; 0 for padding.
    """
    slots, new_slots = plan.slots
    rows, count = len(slots), len(new_slots)
    keys[key_layer].index_copy_(0, new_slots, key[:count])
    values[value_layer].index_copy_(0, new_slots, value[:count])
    k, v = (
        rearrange(pool[slots.flatten()], "(b s) h d -> b h s d", b=rows)
        for pool in (keys[key_layer], values[value_layer])
    )
    q = rearrange(query[:count], "(b m) h d -> b h m d", b=rows)
    mask = plan.mask(window, query.dtype)
    if not softcap and sinks is None:
        grouped = q.shape[1] != k.shape[1]
        attended = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
    else:
        attended = explicit_attention(q, k, v, mask, scale, softcap, sinks)
    out = query.new_zeros(*query.shape[:2], value.shape[-1])
    out[:count] = rearrange(attended, "b h m d -> (b m) h d")
    return out


def explicit_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Attend by way of all scores, where they are capped or may be spent on sinks.

    Args:
        query: Queries, `[B, Hq, M, d]`.
        key: Keys, `[B, H, S, d]`.
        value: Values, `[B, H, S, dv]`.
        mask: Added to the scores, `[B, 1, M, S]`.
        scale: Factor of the scores.
        softcap: Bound of the scores, 0 for none.
        sinks: Attention sinks, a score that each head may spend on nothing, `[Hq]`; None for none.

    Returns:
        `[B, Hq, M, dv]`.
    """
    rows, heads, count, _ = query.shape
    grouped = rearrange(query, "b (h g) m d -> b h (g m) d", h=key.shape[1])  # keys stay as they are, not repeated
    scores = (grouped @ key.mT).float().view(rows, heads, count, -1) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask.float()
    if sinks is not None:
        spent = repeat(sinks.float(), "h -> b h m 1", b=rows, m=count)
        scores = torch.cat([scores, spent], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    weights = rearrange(weights, "b (h g) m s -> b h (g m) s", h=key.shape[1])
    return (weights @ value).view(rows, heads, count, -1)


def tree_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    plan: Plan | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as an attention function of transformers, over the new nodes of token trees.

    Args:
        module: The attention module, which knows its `layer_idx`.
        query: Queries of the new nodes, `[1, Hq, T, d]`.
        key: Keys of the new nodes, `[1, H, T, d]`.
        value: Values of the new nodes, `[1, H, T, dv]`.
        attention_mask: Not read.
        plan: Comes with the model's own keyword arguments; a model that hands none on finds it in `RUNNING_PLAN`.
        scaling: Factor of the scores; None for `d ** -0.5`.
        softcap: Bound of the scores; None or 0 for none.
        s_aux: Attention sinks, `[Hq]`; None for none.
        kwargs: What else transformers hands over; not read.

    Returns:
        What the nodes attend to, `[1, T, Hq, dv]`, and None in place of the weights.
    """
    plan = RUNNING_PLAN.get() if plan is None else plan
    query, key, value = (rearrange(x, "1 h t d -> t h d") for x in (query, key, value))
    home = plan.pools[module.layer_idx]
    assert home is not None, "a layer attends to what it did not attend to when the model was bound"
    attend = tree_attention if query.is_cuda else partial(gathered_attention, plan)
    out = attend(
        query,
        key,
        value,
        *home,
        plan.length,
        plan.depth,
        plan.ancestors,
        plan.table,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=plan.windows[module.layer_idx],
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return out[None], None
