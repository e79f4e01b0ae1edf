"""Fused attention of the blocks at many positions of given sequences, for trainings on a GPU.

A block's positions attend to a range of the committed entries of their sequence, and to a range of the block. So one
call of FlexAttention serves all blocks of a sequence: its keys are the entries of the tokens, followed by those of the
blocks, and its kernels skip tiles that no query of a tile sees. Scores are never in memory.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from redrafter.errors import first_line, warn

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

TILE = 128  # queries, and keys, of a tile of FlexAttention's masks
# Fewer queries than a tile would else have the kernel for decoding, which divides keys by other rules.
KERNEL_OPTIONS = {"FORCE_USE_FLEX_ATTENTION": True}


class SeenRanges(NamedTuple):
    """The keys that P = c Q positions of the blocks at c anchors of each of B sequences attend to.

    Keys are the entries of the T tokens, then those of the P positions, the blocks one after another.

    Attributes:
        first: The first committed entry that each position sees, `[B, P]` int32.
        last: The last one, `[P]` int32; below `first` where there is none.
        own_first: The first position of its block that each position sees, as a key, `[P]` int32.
        own_last: The last one, `[P]` int32.
        keys: T + P.
    """

    first: Tensor
    last: Tensor
    own_first: Tensor
    own_last: Tensor
    keys: int

    @classmethod
    def of_blocks(
        cls, columns: Tensor, starts: Tensor, length: int, size: int, window: int | None, *, sees_later: bool
    ) -> "SeenRanges":
        """Return the ranges of blocks of `size` positions.

        Args:
            columns: Column of each anchor, the last committed token, `[c]` int64.
            starts: The first entry that each anchor sees without a window, `[B, c]` int64.
            length: T, tokens of a sequence.
            size: Q, positions of a block.
            window: Positions that each position sees, its own included; None for all.
            sees_later: Whether positions see later ones of their block.
        """
        reach = length + size if window is None else window
        slot, block = torch.arange(size, device=columns.device), torch.arange(len(columns), device=columns.device)
        nearest = columns[:, None] + slot + 2 - reach  # [c, Q]
        first = torch.maximum(starts[:, :, None], nearest)  # [B, c, Q]
        last = columns[:, None].expand(-1, size)
        own = (length + block * size)[:, None]  # [c, 1]
        own_first = own + (slot + 1 - reach).clamp(min=0)
        own_last = own + (torch.full_like(slot, size - 1) if sees_later else slot)
        ranges = [x.flatten(-2).int() for x in (first, last, own_first, own_last)]
        return cls(ranges[0], ranges[1], ranges[2], ranges[3], length + len(columns) * size)

    def mask(self) -> "BlockMask":
        """Return the mask for FlexAttention."""
        from torch.nn.attention.flex_attention import BlockMask

        first, last, own_first, own_last, keys = self
        queries = len(last)
        begin = torch.arange(0, keys, TILE, device=last.device, dtype=torch.int32)  # [k], of each tile of keys
        end = begin + TILE - 1

        def by_tile(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
            # Positions that fill the last tile see nothing.
            padding = 0, -queries % TILE
            low, high = pad(low, padding, value=keys), pad(high, padding, value=-1)
            low, high = (x.unflatten(-1, (-1, TILE)) for x in (low, high))
            met = (low.amin(dim=-1)[..., None] <= end) & (high.amax(dim=-1)[..., None] >= begin)
            whole = (low.amax(dim=-1)[..., None] <= begin) & (high.amin(dim=-1)[..., None] >= end)
            return met, whole  # [..., q, k]

        (met, whole), (own_met, own_whole) = by_tile(first, last.expand_as(first)), by_tile(own_first, own_last)
        whole = whole | own_whole  # [B, q, k]
        partly = (met | own_met) & ~whole

        def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            committed = (key >= first[row, query]) & (key <= last[query])
            return committed | ((key >= own_first[query]) & (key <= own_last[query]))

        return BlockMask.from_kv_blocks(
            *_list_tiles(partly), *_list_tiles(whole), BLOCK_SIZE=TILE, mask_mod=sees, seq_lengths=(queries, keys)
        )


def _list_tiles(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many tiles of keys each tile of queries reads, `[B, 1, q]`, and these first, `[B, 1, q, k]`."""
    marked = tiles[:, None].int()
    return marked.sum(dim=-1, dtype=torch.int32), marked.argsort(dim=-1, descending=True, stable=True).int()


def attend_ranges(query: Tensor, key: Tensor, value: Tensor, mask: "BlockMask") -> Tensor:
    """Attend with FlexAttention and return the attended values, `[B, P, h, d]`.

    Args:
        query: Queries of the positions, `[B, P, h, d]`.
        key: Keys of the tokens and of the positions, `[B, T + P, H, d]`.
        value: Their values, `[B, T + P, H, d]`, in the dtype that the products are computed in.
        mask: The mask from `SeenRanges`.
    """
    query, key, value = (x.to(value.dtype).transpose(1, 2) for x in (query, key, value))
    # All are in one dtype already, and FlexAttention's backward has no autocast.
    with torch.autocast(query.device.type, enabled=False):
        attended: Tensor = compiled_attention()(
            query, key, value, block_mask=mask, enable_gqa=True, kernel_options=KERNEL_OPTIONS
        )
    return attended.transpose(1, 2)


@cache
def compiled_attention() -> Callable[..., Any]:
    """Return FlexAttention, compiled once for all layers. Uncompiled, it would compute all scores."""
    from torch.nn.attention.flex_attention import flex_attention  # takes a while to import

    return torch.compile(flex_attention)


TRIED: dict[tuple[object, ...], bool] = {}  # whether FlexAttention was compiled for a shape, by shape


def can_fuse(mask: "BlockMask", heads: int, key_heads: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether `attend_ranges` computes layers of a shape and their gradients on the device of a mask.

    The first call for a shape compiles it, or warns of the reason. It must not be called while a forward is recorded
    that is computed again for the gradients.
    """
    (queries, keys), rows, device = mask.seq_lengths, mask.kv_num_blocks.shape[0], mask.kv_num_blocks.device
    shape = rows, queries, keys, heads, key_heads, head_dim, dtype, device
    if shape not in TRIED:
        try:
            with torch.enable_grad():
                query, key, value = (
                    torch.zeros(rows, count, many, head_dim, dtype=dtype, device=device, requires_grad=True)
                    for count, many in ((queries, heads), (keys, key_heads), (keys, key_heads))
                )
                attend_ranges(query, key, value, mask).sum().backward()
            TRIED[shape] = True
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the compiler, of Triton or of the driver
            reason = f"FlexAttention cannot be compiled for it: {first_line(error)}"
            warn(f"training computes attention with all scores in memory, slower: {reason}")
            TRIED[shape] = False
    return TRIED[shape]
