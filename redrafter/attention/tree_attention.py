"""Attention of token trees over a paged cache, as one operator for any Hugging Face model.

The new nodes of all rows are concatenated to a single sequence of T tokens (varlen), so that a compiler sees one
dynamic length and no batch. Attention receives its other inputs as a `Plan` through the model's own keyword arguments,
and the operator both stores the new keys and values and attends, so the model needs no cache object.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from redrafter import kernels
from redrafter.attention.invariant_attention import invariant_attention
from redrafter.attention.mask import attend_to_seen
from redrafter.attention.tree_plan import RUNNING_PLAN, Plan, attention_operator
from redrafter.errors import UnsupportedError
from redrafter.kernels.attention_inputs import AttentionInputs
from redrafter.kernels.cache_format import read_slots, write_slots


def register_attention(
    name: str, attention: Callable[..., tuple[Tensor, None]], *, masks_for_others: bool = False
) -> None:
    """Register an attention function, which needs no masks, with transformers twice: unchanged, and without softcap.

    Args:
        name: Name of the function, as for `replacement_for`. A name with "sdpa" or "flash" would make transformers
            check for those.
        attention: The function, which takes `softcap` as a keyword.
        masks_for_others: Whether forwards of other threads, which meet the name in the model's config, get masks for
            `attend_for_others`. Making them cannot be captured.
    """

    @wraps(attention)
    def uncapped(*args: object, softcap: float | None = None, **kwargs: object) -> tuple[Tensor, None]:
        return attention(*args, **kwargs)

    for registered, function in ((name, attention), (_uncapped(name), uncapped)):
        AttentionInterface.register(registered, function)
        if masks_for_others:
            AttentionMaskInterface.register(registered, _mask_for_others)


def replacement_for(loaded: str, name: str) -> str:
    """Return the name under which a function, registered as `name`, replaces the `loaded` attention."""
    # transformers' sdpa ignores softcap, and the replacement must compute the same.
    return _uncapped(name) if loaded == "sdpa" else name


def _uncapped(name: str) -> str:
    return f"{name}_uncapped"


def _mask_for_others(*args: object, **kwargs: object) -> Tensor | None:
    # A forward of ours needs none; one of another thread meanwhile has transformers' additive one.
    return None if RUNNING_PLAN.get(None) is not None else ALL_MASK_ATTENTION_FUNCTIONS["eager"](*args, **kwargs)


def attend_for_others(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, None]:
    """Attend in a forward of another thread, which a registered function of ours gets as the model's config names it.

    Raises:
        UnsupportedError: It has no mask and may need one, as on a GPU.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if mask is None and query.device.type != "cpu":
        raise UnsupportedError(
            "the model was called while an engine on it decoded in another thread: on a GPU, call it before or after"
        )
    if not softcap and sinks is None:
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scale)
    assert mask is not None, "a model whose scores are capped or spent on sinks has additive masks"
    out = explicit_attention(query, key, value, mask=mask, scale=scale, softcap=softcap or 0.0, sinks=sinks)
    return out.transpose(1, 2), None


def stacked_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' "sdpa" does under a mask, without a copy of keys and values for each query head.

    Queries `[B, Hq, M, d]` that share a key head are stacked along the tokens. The copies took most of the time of
    attention on a CPU: with 4 nodes, 0.5 of 1.2 ms over 1,024 slots, and 0.4 of 0.6 over 320.
    """
    group = query.shape[1] // key.shape[1]
    if query.shape[2] == 1 and attention_mask is None and kwargs.get("position_bias") is None:
        out = scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=group > 1)
        return out.transpose(1, 2), None
    if group == 1 or attention_mask is None or attention_mask.shape[1] > 1 or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    stacked = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
    mask = attention_mask.repeat(1, 1, group, 1)
    out = scaled_dot_product_attention(stacked, key, value, attn_mask=mask, scale=scaling)
    return out.view(*query.shape[:3], -1).transpose(1, 2).contiguous(), None


ATTENTION_NAME = "redrafter_tree"
HOST_ATTENTION_NAME = "redrafter_tree_on_host"  # the same, where forwards are neither compiled nor captured


def gathered_attention(plan: Plan, inputs: AttentionInputs) -> Tensor:
    """Compute the result of `tree_attention` faster on a CPU, with torch's attention over copied keys and values.

    The new keys and values are stored in the pools. Then the keys and values of each row, whose blocks are scattered
    over the pools, are copied into contiguous tensors, and all rows attend to theirs in one call under a mask. The
    inputs must belong to a forward with this plan.
    """
    out, query = inputs.new_output().zero_(), inputs.query
    grouped = not inputs.softcap and inputs.sinks is None
    # Queries that share a key head are stacked along the tokens: enable_gqa would copy the keys for each of them.
    group = inputs.heads[1] if grouped else 1
    for part in (plan.trees, *plan.chunks):
        for store, x in inputs.sides():
            write_slots(store, part.new_slots, x[part.tokens])
        k, v = (rearrange(read_slots(x, part.slots, query.dtype), "b s h d -> b h s d") for x, _ in inputs.sides())
        q = rearrange(part.by_row(query), "b m (h g) d -> b h (g m) d", g=group)
        mask = part.mask(inputs.window, inputs.chunk_size, inputs.first, query.dtype, group)
        attended = attend_to_seen(partial(_attend_rows, inputs, q, mask), k, v, partial(torch.eq, mask[:, 0], 0))
        out[part.tokens] = part.flat(rearrange(attended, "b h (g m) d -> b m (h g) d", g=group))
    return out


tree_attention = attention_operator(
    "tree_attention",
    lambda inputs: gathered_attention(Plan((), (), inputs.rows), inputs),
    kernels.attention.tree_attention if kernels.TRITON else None,
)


def _attend_rows(inputs: AttentionInputs, query: Tensor, mask: Tensor, key: Tensor, value: Tensor) -> Tensor:
    if inputs.softcap or inputs.sinks is not None:
        return explicit_attention(
            query, key, value, mask=mask, scale=inputs.scale, softcap=inputs.softcap, sinks=inputs.sinks
        )
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=inputs.scale)


def explicit_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Attend by computing all scores, for a softcap or sinks `[Hq]`; returns `[B, Hq, M, dv]`.

    Queries are `[B, Hq, M, d]`, keys and values `[B, H, S, d]`; the mask `[B, 1, M, S]` is added to the scores.
    """
    rows, heads, count, _ = query.shape
    grouped = rearrange(query, "b (h g) m d -> b h (g m) d", h=key.shape[1])  # avoids repeating the keys
    scores = (grouped @ key.mT).float().view(rows, heads, count, -1) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask.float()
    if sinks is not None:
        spent = repeat(sinks.float(), "h -> b h m 1", b=rows, m=count)
        scores = torch.cat([scores, spent], dim=-1)
    # The weights of sinks are removed after the softmax, as they belong to no value.
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
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend as an attention function of transformers, over the new nodes of token trees.

    Queries are `[1, Hq, T, d]`, the output `[1, T, Hq, dv]`, with None in place of the weights. `plan` is passed
    through the model's keyword arguments; a model that does not pass them on finds it in `RUNNING_PLAN`. If there is
    none either, the call belongs to another thread's forward.
    """
    if plan is None:
        # A compiler traces our forwards alone, where there is one.
        plan = RUNNING_PLAN.get() if torch.compiler.is_compiling() else RUNNING_PLAN.get(None)
    if plan is None:
        return attend_for_others(module, query, key, value, attention_mask, scaling, softcap, s_aux)
    # Not einops: a compiler would trace its code in every layer, which took half of the time of tracing a model.
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, d] each
    home = plan.pools[module.layer_idx]
    assert home is not None, "a layer attends to a layer that it did not attend to when the model was bound"
    out = _operator(plan, query.device)(
        query,
        key,
        value,
        *home,
        *plan.tensors,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        plan.windows[module.layer_idx],
        softcap or 0.0,
        s_aux,
        plan.chunk_sizes[module.layer_idx] if plan.chunk_sizes else 0,
    )
    return out[None], None


def _operator(plan: Plan, device: torch.device) -> Callable[..., Tensor]:
    """Return the function that computes a plan's attention on a device."""
    if plan.invariant:
        return invariant_attention
    if device.type == "cuda":
        return tree_attention
    return lambda *arguments: gathered_attention(plan, AttentionInputs.from_arguments(*arguments))
