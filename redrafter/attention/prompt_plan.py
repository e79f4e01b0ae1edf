"""Forwards over pieces of prompts on a CPU: how prompts are cut, and what attention must know of each forward."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from redrafter.attention.mask import AttentionKind, additive_mask
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.kernels.cache_format import read_slots, write_slots

__all__ = ["PagedPrompt", "Piece", "PromptPlan", "cut_prompts"]


@dataclass(frozen=True)
class Piece:
    """A run of a prompt's tokens that one forward reads; the cache holds all tokens before it.

    Attributes:
        row: Row of the prompt in its batch.
        first: Position of the first token.
        end: Position behind the last token.
    """

    row: int
    first: int
    end: int

    @property
    def count(self) -> int:
        """Number of prompt tokens in this piece, all of which one forward reads."""
        return self.end - self.first


def cut_prompts(start: Sequence[int], length: Sequence[int], max_tokens: int) -> list[list[Piece]]:
    """Cut what is left to read of each row into forwards of about equally many tokens.

    Args:
        start: Tokens of each row that are read already.
        length: Tokens of each row up to which to read.
        max_tokens: The most tokens of one forward.

    Returns:
        The pieces of each forward, one row behind the other.
    """
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
    """Where a paged cache keeps the rows of a forward over pieces.

    Attributes:
        pools: Per layer, the pools of its keys and values, as in `Plan`.
        new: Slots of the T tokens that are read, `[T]` int64.
        seen: Per piece, the slots of its row from the first token to the piece's last, `[end]` int64.
    """

    pools: tuple[tuple[Tensor, int, Tensor, int] | None, ...]
    new: Tensor
    seen: list[Tensor]

    @classmethod
    def of(cls, pools: Any, table: Tensor, pieces: Sequence[Piece]) -> "PagedPrompt":
        """Look up the slots of a forward's tokens.

        Args:
            pools: Per layer, the pools of its keys and values.
            table: The blocks of each row in order of position, `[B, M]` int32.
            pieces: The pieces that the forward reads.
        """
        positions = torch.arange(max(piece.end for piece in pieces))
        blocks, offsets = positions // BLOCK_SIZE, positions % BLOCK_SIZE
        seen = [table[p.row].long()[blocks[: p.end]] * BLOCK_SIZE + offsets[: p.end] for p in pieces]
        return cls(pools, torch.cat([slots[p.first :] for p, slots in zip(pieces, seen, strict=True)]), seen)

    def store(self, layer: int, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Store a layer's new keys and values, and yield what each piece attends to.

        Args:
            layer: Index of the layer.
            key: Keys of the new tokens, `[H, T, d]`.
            value: Values of the new tokens, `[H, T, dv]`.

        Yields:
            Per piece, keys `[H, end, d]` and values `[H, end, dv]` from its row's first token on.
        """
        home = self.pools[layer]
        assert home is not None, "a layer attends to what it did not attend to when the model was bound"
        keys, key_layer, values, value_layer = home
        sides = ((keys[key_layer], key), (values[value_layer], value))
        for pool, states in sides:
            write_slots(pool, self.new, states.transpose(0, 1))
        for slots in self.seen:
            k, v = (read_slots(pool, slots, states.dtype).transpose(0, 1) for pool, states in sides)
            yield k, v


@dataclass(frozen=True)
class PromptPlan:
    """What attention must know of one forward over pieces of prompts, T tokens one behind the other.

    Attributes:
        pieces: What the forward reads.
        kinds: Kind of attention of each layer.
        paged: Where keys and values go; None where the model hands them to a `DenseCache` itself.
        masks: Masks along the edges of windows, made when first needed, by tokens, slots and dtype.
    """

    pieces: Sequence[Piece]
    kinds: Sequence[AttentionKind]
    paged: PagedPrompt | None = None
    masks: dict[tuple[int, int, torch.dtype], Tensor] = field(default_factory=dict)

    def attended(self, layer: int, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the keys and values that each piece attends to, `[H, S, d]`, from its row's first token on.

        They reach to the piece's end or further.

        Args:
            layer: Index of the layer.
            key: Keys of the new tokens, `[1, H, T, d]`, or all that a `DenseCache` holds, `[B, H, S, d]`.
            value: Values, likewise.
        """
        if self.paged is not None:
            yield from self.paged.store(layer, key[0], value[0])
            return
        for piece in self.pieces:
            yield key[piece.row], value[piece.row]

    def window_edge_mask(self, count: int, slots: int, dtype: torch.dtype) -> Tensor:
        """Return the mask of successive tokens that a sliding window lets see equally many slots each.

        The window moves by one slot from each token to the next: token i sees slots i to `i + slots - count`.

        Args:
            count: Number of tokens.
            slots: Number of slots that at least one of the tokens sees; slot 0 is the first one that token 0 sees.
            dtype: Dtype of the mask.

        Returns:
            What to add to attention scores, `[1, 1, count, slots]`: 0 where a token sees a slot, the lowest finite
            value of `dtype` elsewhere. It is kept in `masks`, so never write to it.
        """
        key = (count, slots, dtype)
        if key not in self.masks:
            seen = torch.ones(1, count, slots, dtype=torch.bool).triu().tril(slots - count)
            self.masks[key] = additive_mask(seen, dtype)
        return self.masks[key]
