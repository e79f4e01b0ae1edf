"""Prompts on a CPU: read without padding, and attended to without a mask that is as wide as a prompt is long.

Of a tree a mask must say who sees whom. In a prompt every token sees the ones before it, so its attention is two plain
products, over what the cache held already and over the new tokens, joined by the sum of their weights. A sliding
window needs a mask only along its edge, for a block of tokens at a time. What a forward holds beside the cache grows
with its own tokens, never with the square of a prompt.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from redrafter.attention.mask import AttentionKind, additive_mask
from redrafter.attention.tree_attention import RUNNING_PLAN, explicit_attention
from redrafter.kernels.block_size import BLOCK_SIZE

__all__ = ["PROMPT_ATTENTION_NAME", "PagedPrompt", "Piece", "PromptPlan", "cut_prompts", "prompt_attention"]

PROMPT_ATTENTION_NAME = "redrafter_prompt"  # a name holding "sdpa" or "flash" would make transformers check for those
EDGE = 256  # tokens of a block along the edge of a sliding window
SCORES = 1 << 23  # scores that are in memory at once, where each must be looked at

# Unlike `scaled_dot_product_attention`, it also returns the logarithm of each sum of weights.
_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True)
class Piece:
    """Tokens `first` to `end` of row `row`, of which the cache holds all those before."""

    row: int
    first: int
    end: int

    @property
    def count(self) -> int:
        return self.end - self.first


def cut_prompts(start: Sequence[int], length: Sequence[int], max_tokens: int) -> list[list[Piece]]:
    """Cut what each row has left to read, tokens `start` to `length`, into forwards of about equally many tokens, at
    most `max_tokens`, one row behind the other."""
    total = sum(length) - sum(start)
    count = -(-total // max_tokens)
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
class PagedPrompt:
    """Where a paged cache keeps the rows of a forward.

    pools: per layer, as in `Plan`. new: `[T]` int64, the slots of the tokens that are read. seen: per piece, `[end]`,
    those of its row from the first token on.
    """

    pools: tuple[tuple[Tensor, int, Tensor, int] | None, ...]
    new: Tensor
    seen: list[Tensor]

    @classmethod
    def of(cls, pools: Any, table: Tensor, forward: Sequence[Piece]) -> "PagedPrompt":
        """table: `[B, M]`, the blocks of each row in order of position."""
        at = torch.arange(max(piece.end for piece in forward))
        seen = [
            (table[p.row].long()[at[: p.end] // BLOCK_SIZE] * BLOCK_SIZE + at[: p.end] % BLOCK_SIZE) for p in forward
        ]
        return cls(pools, torch.cat([slots[p.first :] for p, slots in zip(forward, seen, strict=True)]), seen)

    def store(self, layer: int, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Keep key, value `[H, T, d]`. Yields each piece's keys and values from its row's first token on."""
        home = self.pools[layer]
        assert home is not None, "a layer attends to what it did not attend to when the model was bound"
        keys, key_layer, values, value_layer = home
        sides = ((keys[key_layer], key), (values[value_layer], value))
        for pool, states in sides:
            pool.index_copy_(0, self.new, states.transpose(0, 1))
        for slots in self.seen:
            k, v = (pool[slots].transpose(0, 1) for pool, _ in sides)
            yield k, v


@dataclass(frozen=True)
class PromptPlan:
    """One forward over pieces of prompts, T tokens one behind the other, as attention must know it.

    kinds: per layer. paged: where keys and values go; None where the model hands them to a `DenseCache` itself.
    masks: along the edges of windows, made when they are first needed.
    """

    forward: Sequence[Piece]
    kinds: Sequence[AttentionKind]
    paged: PagedPrompt | None = None
    masks: dict[tuple[int, int, torch.dtype], Tensor] = field(default_factory=dict)

    def attended(self, layer: int, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each piece's keys and values `[H, S, d]`, from its row's first token on to its own end or further.

        key, value: `[1, H, T, d]`, of the new tokens, or what a `DenseCache` holds, `[B, H, S, d]`.
        """
        if self.paged is not None:
            yield from self.paged.store(layer, key[0], value[0])
            return
        for piece in self.forward:
            yield key[piece.row], value[piece.row]

    def edge(self, count: int, slots: int, dtype: torch.dtype) -> Tensor:
        """What is added to the scores of `count` tokens along the edge of a window, which together see `slots` slots,
        each as many as another: `[1, 1, count, slots]`."""
        key = (count, slots, dtype)
        if key not in self.masks:
            seen = torch.ones(1, count, slots, dtype=torch.bool).triu().tril(slots - count)
            self.masks[key] = additive_mask(seen, dtype)
        return self.masks[key]


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
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend for transformers: query `[1, Hq, T, d]`; key, value as in `PromptPlan.attended`. Returns `[1, T, Hq, dv]`.

    plan: comes with the model's own keyword arguments; a model that hands none on finds it in `RUNNING_PLAN`. Where
        there is none either, another thread runs the model meanwhile, and is given plain attention.
    """
    plan = RUNNING_PLAN.get(None) if plan is None else plan
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if plan is None:
        if not softcap and s_aux is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scale)
        assert attention_mask is not None, "a model whose scores are capped or spent on sinks has additive masks"
        return explicit_attention(query, key, value, attention_mask, scale, softcap or 0.0, s_aux).transpose(1, 2), None
    kind, dtype = plan.kinds[module.layer_idx], query.dtype
    heads, (all_heads, count, width) = key.shape[1], query.shape[1:]
    queries = query.view(heads, all_heads // heads, count, width)  # [H, G, T, d]
    out = query.new_empty(count, all_heads, value.shape[-1])
    places = out.view(count, heads, -1, value.shape[-1]).permute(1, 2, 0, 3)  # [H, G, T, dv]
    behind = 0  # tokens of the pieces before
    attended = plan.attended(module.layer_idx, key, value)
    for piece, (k, v) in zip(plan.forward, attended, strict=True):
        for begin, end, reach in _blocks(kind, piece):
            at, size, seen = behind + begin - piece.first, end - begin, end - reach
            block = (queries.narrow(2, at, size), k.narrow(1, reach, seen), v.narrow(1, reach, seen))
            if softcap:
                found = _scored(*block, kind, scale, softcap, s_aux)
            else:
                found = _summed(*block, plan.edge(size, seen, dtype) if _banded(kind, begin) else None, scale, s_aux)
            places.narrow(2, at, size).copy_(found)
        behind += piece.count
    return out[None], None


def _mask_of_others(*args: Any, **kwargs: Any) -> Tensor | None:
    """Make no mask for a forward of ours, and transformers' additive one for a forward of another thread."""
    return None if RUNNING_PLAN.get(None) is not None else ALL_MASK_ATTENTION_FUNCTIONS["eager"](*args, **kwargs)


AttentionInterface.register(PROMPT_ATTENTION_NAME, prompt_attention)
AttentionMaskInterface.register(PROMPT_ATTENTION_NAME, _mask_of_others)


def _banded(kind: AttentionKind, begin: int) -> bool:
    """Whether tokens from `begin` on do not all see back to the same slot."""
    return kind.window is not None and begin >= kind.window


def _blocks(kind: AttentionKind, piece: Piece) -> Iterator[tuple[int, int, int]]:
    """Cut a piece into blocks: first token, end, and the first slot that any token of the block sees. All of a block
    see back to that slot, or it is along the edge of a window."""
    begin = piece.first
    while begin < piece.end:
        end, reach = piece.end, 0
        if kind.chunk is not None:
            reach = begin // kind.chunk * kind.chunk
            end = min(end, reach + kind.chunk)
        elif _banded(kind, begin):
            assert kind.window is not None
            reach = begin - kind.window + 1
            end = min(end, begin + EDGE)
        elif kind.window is not None:
            end = min(end, kind.window)
        yield begin, end, reach
        begin = end


def _summed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None) -> Tensor:
    """q: `[H, G, n, d]`, the last n of the S tokens of k `[H, S, d]` and v `[H, S, dv]`; each sees what `mask` lets it,
    or, without one, all before it. sinks: `[H * G]`, or None. Returns `[H, G, n, dv]`."""
    before = k.shape[1] - q.shape[2]
    if mask is not None or not before:
        found, total = _flash(q, k, v, scale, mask=mask, causal=mask is None)
    else:
        older, older_total = _flash(q, k[:, :before], v[:, :before], scale)
        found, total = _flash(q, k[:, before:], v[:, before:], scale, causal=True)
        share = torch.sigmoid(older_total - total)[..., None]
        found = torch.lerp(found.to(share.dtype), older.to(share.dtype), share)
        total = torch.logaddexp(total, older_total)
    if sinks is not None:
        found = found * torch.sigmoid(total - sinks.to(total.dtype).view(*q.shape[:2], 1))[..., None]
    return found


def _flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention, `[H, G, n, dv]`, and the logarithm of each token's sum of weights, `[H, G, n]`."""
    groups, width = q.shape[1], v.shape[-1]
    if width != q.shape[-1]:  # the kernel knows one width only; zeros add nothing to a product
        q, k, v = (pad(x, (0, max(width, q.shape[-1]) - x.shape[-1])) for x in (q, k, v))
    k, v = k[:, None].expand(-1, groups, -1, -1), v[:, None].expand(-1, groups, -1, -1)
    found, total = _flash_attention(q, k, v, is_causal=causal, attn_mask=mask, scale=scale)
    return found[..., :width], total


def _scored(
    q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """As `_summed`, for scores that are capped: some tokens at a time, so that their scores do not fill the memory."""
    count, slots = q.shape[2], k.shape[1]
    size = max(SCORES // (q.shape[0] * q.shape[1] * slots), 1)
    at = torch.arange(slots)
    found = []
    for begin in range(0, count, size):
        mine = at[slots - count :][begin : begin + size, None]
        seen = at <= mine  # [n, S]
        if kind.window is not None:
            seen &= at > mine - kind.window
        part = q[:, :, begin : begin + size].flatten(0, 1)[None]
        whole = explicit_attention(part, k[None], v[None], additive_mask(seen[None], q.dtype), scale, softcap, sinks)
        found.append(whole[0])
    return torch.cat(found, dim=1).unflatten(0, q.shape[:2])
