"""Attention masks of token trees after rows of unequal length.

The first n slots of a row hold its committed tokens, at the position of the same number. Node i of its tree is in
scratch slot n + i, at position n + depth[i]. A node sees every committed slot and its own ancestors; with a sliding
window or chunks, only those within the window or chunk. Masks are additive floats: with a boolean one, eager attention
is silently wrong.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionKind:
    """Attention range of a layer; unlimited if both fields are None.

    Attributes:
        window: Positions of a sliding window, the token's own included.
        chunk: Positions of a chunk; a token sees its own chunk only.
    """

    window: int | None = None
    chunk: int | None = None

    def limit(self, seen: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return `seen`, false for keys that are out of the range of a query, by the positions of both."""
        if self.window is not None:
            return seen & (query - key < self.window)
        return seen if self.chunk is None else seen & (query // self.chunk == key // self.chunk)


@dataclass(frozen=True)
class TreeSlots:
    """The slots that a forward over trees reads of each row: which nodes see them, and their positions.

    Attributes:
        length: Committed tokens of each row, `[B]` int64.
        depth: Depth of each node below the root, `[B, N]` int64.
        ancestors: Whether each of the last M nodes descends from a node, or is it, `[B, M, N]` bool.
        count: S, the number of slots, from slot 0 on.
    """

    length: Tensor
    depth: Tensor
    ancestors: Tensor
    count: int

    def seen(self, kind: AttentionKind) -> Tensor:
        """Return the slots that each new node sees under a kind of attention, `[B, M, S]` bool."""
        length, depth, new = self.length, self.depth, self.ancestors.shape[1]
        rows, nodes = depth.shape
        node = torch.arange(self.count, device=length.device) - length[:, None]  # [B, S], negative where committed
        index = node.clamp(0, nodes - 1)
        seen = self.ancestors.gather(2, index[:, None, :].expand(rows, new, self.count))  # [B, M, S]
        seen = (node < 0)[:, None, :] | (seen & (node < nodes)[:, None, :])
        if kind == AttentionKind():
            return seen
        return kind.limit(seen, (length[:, None] + depth[:, -new:])[:, :, None], self.positions[:, None])

    @cached_property
    def positions(self) -> Tensor:
        """The position of each slot's content, `[B, S]` int64; undefined for empty slots."""
        slot = torch.arange(self.count, device=self.length.device)
        node = slot - self.length[:, None]  # [B, S], negative where committed
        position = self.length[:, None] + self.depth.gather(1, node.clamp(0, self.depth.shape[1] - 1))
        return slot.where(node < 0, position)


def additive_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask `[B, 1, M, S]` that is added to attention scores, for `seen` `[B, M, S]` bool.

    It is 0 for slots that are seen, and the lowest finite value of `dtype` for others.
    """
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    # Finite, as a row of -inf, which padding has, would give NaN weights.
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]


def attend_to_seen(
    attend: Callable[[Tensor, Tensor], Tensor], key: Tensor, value: Tensor, seen: Callable[[], Tensor]
) -> Tensor:
    """Attend on a CPU so that tokens do not affect others that do not see them, even with infinite or NaN values.

    An additive mask and a weight of 0 do not hide a NaN: 0 * NaN is NaN. A NaN reaches all tokens of the result, which
    shows whether there is one; so keys and values, many more numbers, are checked only if the result is not finite.

    Args:
        attend: Attends to keys and values under the mask; returns `[..., heads, M, dv]`.
        key: Keys, `[..., H, S, d]`.
        value: Values, `[..., H, S, dv]`.
        seen: Returns which slots each token sees, `[..., M, S]` bool.

    Returns:
        The result of `attend`, with NaN for tokens that see a slot with a number that is not finite.
    """
    out = attend(key, value)
    if math.isfinite(out.sum(dtype=torch.float32)):
        return out
    lost = ~(key.isfinite().all(-1) & value.isfinite().all(-1)).all(-2)  # [..., S]
    out = attend(*(x.masked_fill(lost[..., None, :, None], 0) for x in (key, value)))
    return out.masked_fill((seen() & lost[..., None, :]).any(-1)[..., None, :, None], torch.nan)


@dataclass(frozen=True)
class LayerKinds:
    """The kind of attention of each layer of a model.

    Attributes:
        by_layer: Kind of each decoder layer, in order; None if it could not be observed.
        by_name: Kinds by the names under which the model takes masks: one entry if all layers have the same kind, else
            one for each of `config.layer_types`.
    """

    by_layer: tuple[AttentionKind, ...] | None
    by_name: Mapping[str, AttentionKind]

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """Window of each layer, 0 for all positions; empty if the kinds are unknown."""
        return tuple(kind.window or 0 for kind in self.by_layer or ())

    @cached_property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Chunk size of each layer, 0 for all positions; empty if no layer attends within chunks."""
        sizes = tuple(kind.chunk or 0 for kind in self.by_layer or ())
        return sizes if any(sizes) else ()
