"""Attention of token trees over a paged cache, as one operator that any Hugging Face model can be given.

The new nodes of all rows stand one behind the other in a single sequence of T tokens (varlen), so that a compiler sees
one dynamic length and nothing of the batch. What attention must know beside the queries travels as a `Plan` through the
model's own keyword arguments, and the operator both stores the new keys and values and attends, so the model needs no
cache object.
"""

import itertools
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from redrafter import kernels
from redrafter.attention.invariant_attention import invariant_attention
from redrafter.attention.tree_plan import RUNNING_PLAN, Plan, RowsPlan
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.kernels.cache_format import read_slots, round_trip, write_slots


def register_attention(
    name: str, attention: Callable[..., tuple[Tensor, None]], mask: Callable[..., Tensor | None] | None = None
) -> None:
    """Register an attention function with transformers, once as it is and once capping nothing.

    Args:
        name: Name of the function, which `replacement_for` is given. One that holds "sdpa" or "flash" would make
            transformers check for those.
        attention: The function, which takes `softcap` as a keyword.
        mask: Makes its masks; None where it reads none.
    """

    @wraps(attention)
    def uncapped(*args: Any, softcap: float | None = None, **kwargs: Any) -> tuple[Tensor, None]:
        return attention(*args, **kwargs)

    for registered, function in ((name, attention), (_uncapped(name), uncapped)):
        AttentionInterface.register(registered, function)
        if mask is not None:
            AttentionMaskInterface.register(registered, mask)


def replacement_for(loaded: str, name: str) -> str:
    """Return the name under which a function, registered as `name`, computes what the `loaded` attention does."""
    return _uncapped(name) if loaded == "sdpa" else name


def _uncapped(name: str) -> str:
    return f"{name}_uncapped"


ATTENTION_NAME = "redrafter_tree"


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
    starts: Tensor,
    depth: Tensor,
    ancestors: Tensor,
    table: Tensor,
    chunk_starts: Tensor,
    chunk_lengths: Tensor,
    chunk_table: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    chunk_size: int = 0,
) -> Tensor:
    """Store the new keys and values in the cache, and attend to the committed ones and to each node's ancestors.

    This is the slow reference, for any device. On a GPU a Triton kernel stands in its place, on a CPU
    `gathered_attention`.

    The tokens are those that `Plan` lists: queries `[T, Hq, d]`, keys `[T, H, d]`, values `[T, H, dv]`; the output `[T,
    Hq, dv]` of padding is 0, or any finite numbers where there are chunks. A pool and the index of the layer in it say
    where keys go, and where values. `length` to `chunk_table` are as in `Plan`. `window` positions and a chunk of
    `chunk_size` bound what a node sees, `softcap` its scores, 0 for no bound. Each head may spend a score on nothing,
    its entry of `sinks` `[Hq]`.
    """
    rows, chunks = length.shape[0] - 1, chunk_starts.shape[0] - 2
    nodes = (depth.shape[0] - 1) // rows
    new = (ancestors.shape[0] - 1) // (rows * nodes)
    depth, ancestors = depth[:-1].view(rows, nodes), ancestors[:-1].view(rows, new, nodes)
    out = query.new_zeros(*query.shape[:2], value.shape[-1])
    stores = keys[key_layer], values[value_layer]
    key, value = (round_trip(x, store.dtype) for x, store in zip((key, value), stores, strict=True))

    def attend(tokens: slice, blocks: Tensor, n: int, depth: Tensor, seen: Tensor) -> None:
        """Attend with the new nodes of one row, of nodes at these depths. seen: ancestors of the new ones."""
        before = torch.arange(n + len(depth), device=query.device)  # slots counted along the row
        inside = before // BLOCK_SIZE < len(blocks)
        slots = blocks[(before // BLOCK_SIZE).clamp(max=len(blocks) - 1)].where(inside, 0).long() * BLOCK_SIZE
        slots = slots + before % BLOCK_SIZE
        count = len(seen)
        for store, x in zip(stores, (key, value), strict=True):
            write_slots(store, slots[len(slots) - count :], x[tokens])
        held = len(slots) - count
        k, v = (
            repeat(
                torch.cat([read_slots(store, slots[:held], x.dtype), x[tokens]]),
                "s h d -> s (h g) d",
                g=query.shape[1] // x.shape[1],
            )
            for store, x in zip(stores, (key, value), strict=True)
        )
        scores = torch.einsum("nhd,shd->hns", query[tokens].float(), k.float()) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        visible = torch.cat([seen.new_ones(count, n), seen], dim=1)  # [M, n + N]
        position, at = torch.cat([before[:n], n + depth]), n + depth[len(depth) - count :, None]
        if window:
            visible = visible & (at - position < window)
        if chunk_size:
            visible = visible & (at // chunk_size == position // chunk_size)
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, repeat(sinks.float(), "h -> h n 1", n=count)], dim=-1)
        weights = scores.softmax(-1)[..., : len(slots)]
        out[tokens] = torch.einsum("hns,shd->nhd", weights, v.float()).to(out.dtype)

    for row, (first, end) in enumerate(itertools.pairwise(starts.tolist())):
        held = nodes - new + end - first  # of a ragged tree, the first nodes alone
        blocks = table[:-1].view(rows, -1)[row]
        attend(slice(first, end), blocks, int(length[row]), depth[row, :held], ancestors[row, : end - first, :held])
    for chunk, (first, end) in enumerate(itertools.pairwise(chunk_starts.tolist()[: chunks + 1])):
        if end > first:
            depth_in_chunk = torch.arange(end - first, device=query.device)
            blocks = chunk_table[:-1].view(chunks + 1, -1)[chunk]
            seen = depth_in_chunk[:, None] >= depth_in_chunk
            attend(slice(first, end), blocks, int(chunk_lengths[chunk]), depth_in_chunk, seen)
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
    chunk_size: int = 0,
) -> Tensor:
    """Compute what `tree_attention` computes, faster on a CPU, with torch's attention over copied keys and values.

    The new keys and values are stored in the pools. Then the keys and values of each row, whose blocks are scattered
    over the pools, are copied into contiguous tensors, and all rows attend to theirs in one call under a mask.

    The arguments are those of `tree_attention`; the tensors that are not named are those of `plan`.
    """
    out = query.new_zeros(*query.shape[:2], value.shape[-1])
    stores = keys[key_layer], values[value_layer]

    def attend(part: RowsPlan) -> None:
        for store, x in zip(stores, (key, value), strict=True):
            write_slots(store, part.new_slots, x[part.tokens])
        k, v = (rearrange(read_slots(store, part.slots, query.dtype), "b s h d -> b h s d") for store in stores)
        plain = not softcap and sinks is None
        # Queries that share a key head stand one after the other: enable_gqa would copy the keys for each of them.
        group = query.shape[1] // key.shape[1] if plain else 1
        q = rearrange(part.by_row(query), "b m (h g) d -> b h (g m) d", g=group)
        mask = part.mask(window, chunk_size, query.dtype, group)
        if plain:
            attended = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        else:
            attended = explicit_attention(q, k, v, mask, scale, softcap, sinks)
        out[part.tokens] = part.flat(rearrange(attended, "b h (g m) d -> b m (h g) d", g=group))

    for part in (plan.trees, *plan.chunks):
        attend(part)
    return out


def explicit_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Attend by way of all scores, where they are capped or may be spent on sinks `[Hq]`; returns `[B, Hq, M, dv]`.

    Queries are `[B, Hq, M, d]`, keys and values `[B, H, S, d]`; the mask `[B, 1, M, S]` is added to the scores.
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

    Queries are `[1, Hq, T, d]`, the output `[1, T, Hq, dv]`, beside None in place of the weights. `plan` comes with the
    model's own keyword arguments; a model that hands none on finds it in `RUNNING_PLAN`.
    """
    plan = RUNNING_PLAN.get() if plan is None else plan
    query, key, value = (rearrange(x, "1 h t d -> t h d") for x in (query, key, value))
    home = plan.pools[module.layer_idx]
    assert home is not None, "a layer attends to what it did not attend to when the model was bound"
    # The operator of one order of sums knows no chunks; `batch_invariance.support_of` refuses models that have them.
    chunked = {"chunk_size": plan.chunk_sizes[module.layer_idx]} if plan.chunk_sizes else {}
    out = _operator(plan, query.device)(
        query,
        key,
        value,
        *home,
        *plan.tensors,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=plan.windows[module.layer_idx],
        softcap=softcap or 0.0,
        sinks=s_aux,
        **chunked,
    )
    return out[None], None


def _operator(plan: Plan, device: torch.device) -> Any:
    """Return what computes a plan's attention on a device."""
    if plan.invariant:
        return invariant_attention
    return tree_attention if device.type == "cuda" else partial(gathered_attention, plan)
