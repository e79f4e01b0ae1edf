"""Attention of packed token trees over a paged cache, as one operator that any Hugging Face model can be given.

All rows of a batch stand one behind the other in a single sequence of `T` tokens, so that a compiler sees one dynamic
length and nothing of the batch. What attention must know beside the queries travels as a `Plan` through the model's own
keyword arguments, and the operator both stores the new keys and values and attends, so the model needs no cache object.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from redrafter import kernels
from redrafter.attention.mask import AttentionKind, additive_mask, visible_slots
from redrafter.kernels.block_size import BLOCK_SIZE

__all__ = [
    "ATTENTION_NAME",
    "RUNNING_PLAN",
    "Plan",
    "explicit_attention",
    "gathered_attention",
    "tree_attention",
    "tree_attention_forward",
]

ATTENTION_NAME = "redrafter_tree"  # a name holding "sdpa" or "flash" would make transformers check for those


@dataclass(frozen=True)
class Plan:
    """One forward over the last M of a tree's N nodes, as attention must know it. All flat, each with one spare entry
    at its end, since a compiler treats a dimension that is ever 1 as a case of its own.

    pools: per layer, the pool and index of the keys that it attends to, then of the values; a pool is `[G, slots,
        heads, dim]`. None for a layer that attends to nothing of the text.
    windows: per layer, positions that a node looks back, 0 for all. They are learnt from the masks that the model
        makes, since not every model tells its attention function.
    length: `[B + 1]` int64, committed tokens. depth: `[B*N + 1]` int64. ancestors: `[B*M*N + 1]` bool.
    table: `[B*M + 1]` int32, the blocks of each row in order of position.
    """

    pools: tuple[tuple[Tensor, int, Tensor, int] | None, ...]
    windows: tuple[int, ...]
    length: Tensor
    depth: Tensor
    ancestors: Tensor
    table: Tensor

    @property
    def sizes(self) -> tuple[int, int, int]:
        """B, N and M."""
        rows = self.length.shape[0] - 1
        nodes = (self.depth.shape[0] - 1) // rows
        return rows, nodes, (self.ancestors.shape[0] - 1) // (rows * nodes)

    @cached_property
    def slots(self) -> tuple[Tensor, Tensor]:
        """On a CPU, for all layers: where each row's committed tokens and nodes are, `[B, S]`, and where the new ones
        go, `[B*M]`."""
        rows, nodes, new = self.sizes
        table, length = self.table[:-1].view(rows, -1).long(), self.length[:-1]
        at = torch.arange(int(length.max()) + nodes)
        page = table.gather(1, (at // BLOCK_SIZE).clamp(max=table.shape[1] - 1).expand(rows, -1))
        slots = page.where(at // BLOCK_SIZE < table.shape[1], 0) * BLOCK_SIZE + at % BLOCK_SIZE  # [B, S]
        scratch = length[:, None] + torch.arange(nodes - new, nodes)
        return slots, slots.gather(1, scratch).flatten()

    @cached_property
    def masks(self) -> dict[tuple[int, torch.dtype], Tensor]:
        """On a CPU: what is added to scores, `[B, 1, M, S]`, by window."""
        return {}

    def mask(self, window: int, dtype: torch.dtype) -> Tensor:
        if (window, dtype) not in self.masks:
            rows, nodes, new = self.sizes
            depth, ancestors = self.depth[:-1].view(rows, nodes), self.ancestors[:-1].view(rows, new, nodes)
            kind = AttentionKind(window=window or None)
            seen = visible_slots(self.length[:-1], depth, ancestors, self.slots[0].shape[1], kind)
            self.masks[window, dtype] = additive_mask(seen, dtype)
        return self.masks[window, dtype]


RUNNING_PLAN: ContextVar[Any] = ContextVar("plan of the running forward")


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

    This is the slow reference, for any device. On a GPU a Triton kernel stands in its place, on a CPU
    `gathered_attention`.
    """
    rows = length.shape[0] - 1
    nodes = (depth.shape[0] - 1) // rows
    new = (ancestors.shape[0] - 1) // (rows * nodes)
    count, heads = rows * new, key.shape[1]
    table, depth = table[:-1].view(rows, -1).long(), depth[:-1].view(rows, nodes)
    ancestors, length = ancestors[:-1].view(rows, new, nodes), length[:-1]
    at = length[:, None] + torch.arange(nodes - new, nodes, device=length.device)  # [B, M], the scratch slots
    page = table.gather(1, (at // BLOCK_SIZE).clamp(max=table.shape[1] - 1)).where(at // BLOCK_SIZE < table.shape[1], 0)
    slots = (page * BLOCK_SIZE + at % BLOCK_SIZE).flatten()
    keys[key_layer].index_copy_(0, slots, key[:count])
    values[value_layer].index_copy_(0, slots, value[:count])
    out = query.new_zeros(*query.shape[:2], value.shape[-1])
    for row in range(rows):
        n, own = int(length[row]), slice(row * new, (row + 1) * new)
        before = torch.arange(n + nodes - new, device=length.device)
        page = table[row].gather(0, (before // BLOCK_SIZE).clamp(max=table.shape[1] - 1))
        slots = page.where(before // BLOCK_SIZE < table.shape[1], 0) * BLOCK_SIZE + before % BLOCK_SIZE
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
    """As `tree_attention`, on a CPU: what rows hold is gathered side by side, and torch attends to it."""
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
        found = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    else:
        found = explicit_attention(q, k, v, mask, scale, softcap, sinks)
    out = query.new_zeros(*query.shape[:2], value.shape[-1])
    out[:count] = rearrange(found, "b h m d -> (b m) h d")
    return out


def explicit_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Attention whose scores are capped, or may be spent on sinks, by way of all scores.

    query: `[B, Hq, M, d]`; key: `[B, H, S, d]`; value: `[B, H, S, dv]`; mask: `[B, 1, M, S]`, added to the scores.
    softcap: 0 for none. sinks: `[Hq]`, or None. Returns `[B, Hq, M, dv]`.
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
    """Attend for transformers: query `[1, Hq, T, d]`; key, value `[1, H, T, d]`. Returns `[1, T, Hq, dv]`.

    plan: comes with the model's own keyword arguments; a model that hands none on finds it in `RUNNING_PLAN`.
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
