"""Attention of prompts on a CPU, without padding and without a mask over the whole prompt.

A tree needs a mask of ancestors. In a prompt every token sees all earlier ones, so its attention is two plain products,
over the cached tokens and over the new ones, combined by their sums of weights. A sliding window needs a mask only
along its edge, for a block of tokens at a time. A forward's memory in addition to the cache grows with the number of
its tokens, not with the square of a prompt's length.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from redrafter.attention.mask import AttentionKind, additive_mask, attend_to_seen
from redrafter.attention.tree_attention import attend_for_others, explicit_attention, register_attention
from redrafter.attention.tree_plan import RUNNING_PLAN
from redrafter.kernels.cache_format import read_slots, write_slots


@dataclass(frozen=True)
class Piece:
    """A run of a prompt's tokens that one forward reads; the cache holds all tokens before it.

    Attributes:
        row: Row of the prompt in its batch.
        first: Position of the first token.
        end: Position after the last token.
    """

    row: int
    first: int
    end: int

    @property
    def count(self) -> int:
        """Number of tokens of the piece."""
        return self.end - self.first


def cut_prompts(start: Sequence[int], length: Sequence[int], max_tokens: int) -> list[list[Piece]]:
    """Divide the unread tokens of each row, from `start` to `length`, into forwards of about equal size."""
    total = sum(length) - sum(start)
    count = -(-total // max_tokens)
    # Equal shares rather than full forwards and a small last one, which would cost nearly as much as a full one.
    size = -(-total // max(count, 1))
    forwards: list[list[Piece]] = []
    room = 0
    for row, (first, end) in enumerate(zip(start, length, strict=True)):
        while first < end:
            if not room:
                forwards.append([])
                room = size
            piece = Piece(row, first, min(end, first + room))
            forwards[-1].append(piece)
            first, room = piece.end, room - piece.count
    return forwards


@dataclass(frozen=True)
class PromptPlan:
    """Describes a forward over pieces of prompts, T tokens concatenated, to attention.

    Attributes:
        pieces: The pieces that the forward reads.
        kinds: Kind of attention of each layer.
        new: Slots in which the T tokens are stored, `[T]` int64.
        pools: Per layer, the pools of its keys and values, as in `Plan`; None if the model passes its keys and values
            to a `DenseCache` itself.
        seen: Per piece, the slots in these pools of its row from the first token to the piece's last, `[end]` int64.
        masks: Masks along the edges of windows, created on demand, by tokens, slots and dtype.
    """

    pieces: Sequence[Piece]
    kinds: Sequence[AttentionKind]
    new: Tensor
    pools: tuple[tuple[Tensor, int, Tensor, int] | None, ...] | None = None
    seen: Sequence[Tensor] = ()
    masks: dict[tuple[int, int, torch.dtype], Tensor] = field(default_factory=dict)

    def attended(self, layer: int, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the keys and values that each piece attends to, `[H, S, d]`, from its row's first token on.

        They extend at least to the piece's end. The arguments are those of the new tokens, `[1, H, T, d]`, which are
        stored, or the contents of a `DenseCache`, `[B, H, S, d]`.
        """
        if self.pools is None:
            for piece in self.pieces:
                yield key[piece.row], value[piece.row]
            return
        home = self.pools[layer]
        assert home is not None, "a layer attends to a layer that it did not attend to when the model was bound"
        keys, key_layer, values, value_layer = home
        sides = ((keys[key_layer], key[0]), (values[value_layer], value[0]))
        for store, states in sides:
            write_slots(store, self.new, states.transpose(0, 1))
        for slots in self.seen:
            k, v = (read_slots(store, slots, states.dtype).transpose(0, 1) for store, states in sides)
            yield k, v

    def window_edge_mask(self, count: int, slots: int, dtype: torch.dtype) -> Tensor:
        """Return the mask of consecutive tokens that see equally many slots each through a sliding window.

        The window moves by one slot per token: token i sees slots i to `i + slots - count`. Slot 0 is the first one
        that token 0 sees. The mask `[1, 1, count, slots]` is shared through `masks`, so it must not be modified.
        """
        key = (count, slots, dtype)
        if key not in self.masks:
            seen = torch.ones(1, count, slots, dtype=torch.bool).triu().tril(slots - count)
            self.masks[key] = additive_mask(seen, dtype)
        return self.masks[key]


PROMPT_ATTENTION_NAME = "redrafter_prompt"
MAX_EDGE_TOKENS = 256  # tokens of a block along the edge of a sliding window
MAX_SCORES = 1 << 23  # attention scores in memory at once, where they are computed explicitly

# Unlike `scaled_dot_product_attention`, it also returns the logarithm of each sum of weights.
_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def prompt_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    plan: PromptPlan | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend as an attention function of transformers, over pieces of prompts.

    Queries are `[1, Hq, T, d]`, keys and values as in `PromptPlan.attended`, the output `[1, T, Hq, dv]`, with None
    in place of the weights. `plan` is passed through the model's keyword arguments; a model that does not pass them on
    finds it in `RUNNING_PLAN`. If there is none either, the call belongs to another thread's forward.
    """
    plan = RUNNING_PLAN.get(None) if plan is None else plan
    if plan is None:
        return attend_for_others(module, query, key, value, attention_mask, scaling, softcap, s_aux)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    kind, dtype = plan.kinds[module.layer_idx], query.dtype
    heads, (all_heads, count, width) = key.shape[1], query.shape[1:]
    queries = query.view(heads, all_heads // heads, count, width)  # [H, G, T, d]
    out = query.new_empty(count, all_heads, value.shape[-1])
    out_by_head = out.view(count, heads, -1, value.shape[-1]).permute(1, 2, 0, 3)  # [H, G, T, dv]
    read = 0  # number of tokens of earlier pieces
    attended = plan.attended(module.layer_idx, key, value)
    for piece, (k, v) in zip(plan.pieces, attended, strict=True):
        for first, end, reach in _blocks(kind, piece):
            offset, size, seen = read + first - piece.first, end - first, end - reach
            attend: Callable[[Tensor, Tensor], Tensor]
            asking = queries.narrow(2, offset, size)
            if softcap:
                attend = partial(_attend_by_scores, asking, kind=kind, scale=scale, softcap=softcap, sinks=s_aux)
            else:
                mask = plan.window_edge_mask(size, seen, dtype) if _is_past_window(kind, first) else None
                attend = partial(_attend, asking, mask=mask, scale=scale, sinks=s_aux)
            attention = attend_to_seen(
                attend, k.narrow(1, reach, seen), v.narrow(1, reach, seen), partial(_seen_by_last, size, seen, kind)
            )
            out_by_head.narrow(2, offset, size).copy_(attention)
        read += piece.count
    return out[None], None


register_attention(PROMPT_ATTENTION_NAME, prompt_attention, masks_for_others=True)


def _is_past_window(kind: AttentionKind, first: int) -> bool:
    """Return whether tokens from position `first` on see different first slots, each through its own window."""
    return kind.window is not None and first >= kind.window


def _blocks(kind: AttentionKind, piece: Piece) -> Iterator[tuple[int, int, int]]:
    """Yield the first token, the end and the first visible slot of each block whose attention is one call."""
    # All tokens of a block see the same first slot: that of the prompt, or of their chunk. Only where a sliding window
    # no longer reaches the beginning of the prompt does each token see another first slot.
    first = piece.first
    while first < piece.end:
        end, reach = piece.end, 0
        if kind.chunk is not None:
            reach = first // kind.chunk * kind.chunk
            end = min(end, reach + kind.chunk)
        elif _is_past_window(kind, first):
            assert kind.window is not None
            reach = first - kind.window + 1
            end = min(end, first + MAX_EDGE_TOKENS)
        elif kind.window is not None:
            end = min(end, kind.window)
        yield first, end, reach
        first = end


def _seen_by_last(count: int, slots: int, kind: AttentionKind) -> Tensor:
    """Return which of some slots each of the last `count` tokens sees, within one chunk if any, `[n, S]` bool."""
    slot = torch.arange(slots)
    token = slot[slots - count :, None]
    return (slot <= token) if kind.window is None else (slot <= token) & (slot > token - kind.window)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None) -> Tensor:
    """Attend with the last n of S tokens, under a mask `[1, 1, n, S]`, or without one to all earlier tokens.

    Queries are `[H, G, n, d]`, keys and values `[H, S, d]`, sinks `[H * G]`; returns `[H, G, n, dv]`.
    """
    before = k.shape[1] - q.shape[2]
    if mask is not None or not before:
        out, log_sum = _flash(q, k, v, scale, mask=mask, causal=mask is None)
    else:
        # torch aligns a causal mask at the first key, so the keys before the chunk are attended to separately, without
        # a mask. The logarithms of the two sums of weights determine the share of each part.
        older, older_log_sum = _flash(q, k[:, :before], v[:, :before], scale)
        out, log_sum = _flash(q, k[:, before:], v[:, before:], scale, causal=True)
        share = torch.sigmoid(older_log_sum - log_sum)[..., None]
        out = torch.lerp(out.to(share.dtype), older.to(share.dtype), share)
        log_sum = torch.logaddexp(log_sum, older_log_sum)
    if sinks is not None:
        # A sink adds its exponential to the sum of weights but no value, so all weights shrink by a sigmoid.
        out = out * torch.sigmoid(log_sum - sinks.to(log_sum.dtype).view(*q.shape[:2], 1))[..., None]
    return out


def _flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Return attention, `[H, G, n, dv]`, and the logarithm of each token's sum of weights, `[H, G, n]`."""
    groups, width = q.shape[1], v.shape[-1]
    if width != q.shape[-1]:  # the kernel requires equal widths; zeros add nothing to a product
        q, k, v = (pad(x, (0, max(width, q.shape[-1]) - x.shape[-1])) for x in (q, k, v))
    k, v = k[:, None].expand(-1, groups, -1, -1), v[:, None].expand(-1, groups, -1, -1)
    out, log_sum = _flash_attention(q, k, v, is_causal=causal, attn_mask=mask, scale=scale)
    return out[..., :width], log_sum


def _attend_by_scores(
    q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Attend as `_attend` does, with capped scores, a few tokens at a time to limit the memory of scores."""
    count, slots = q.shape[2], k.shape[1]
    size = max(MAX_SCORES // (q.shape[0] * q.shape[1] * slots), 1)
    parts = []
    for first in range(0, count, size):
        queries = q[:, :, first : first + size].flatten(0, 1)[None]
        mask = additive_mask(_seen_by_last(count, slots, kind)[None, first : first + size], q.dtype)
        parts.append(
            explicit_attention(queries, k[None], v[None], mask=mask, scale=scale, softcap=softcap, sinks=sinks)[0]
        )
    return torch.cat(parts, dim=1).unflatten(0, q.shape[:2])
