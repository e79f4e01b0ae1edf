"""What attention over a paged cache must know of a forward over token trees."""

from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from redrafter.attention.mask import AttentionKind, additive_mask, visible_slots
from redrafter.kernels.block_size import BLOCK_SIZE

__all__ = ["RUNNING_PLAN", "Plan"]


@dataclass(frozen=True)
class Plan:
    """What attention must know of one forward over the last M of a tree's N nodes, for B rows.

    All tensors are flat, each with one spare entry at its end, since a compiler treats a dimension that is ever 1 as a
    case of its own.

    Attributes:
        pools: Per layer, the pool and index of the keys that it attends to, then of the values; a pool is `[G, slots,
            heads, dim]`. None for a layer that attends to nothing of the text.
        windows: Per layer, positions that a node looks back, 0 for all. They are learnt from the masks that the model
            makes, since not every model tells its attention function.
        length: Committed tokens of each row, `[B + 1]` int64.
        depth: Depth of each node below the root, `[B*N + 1]` int64.
        ancestors: Whether each new node descends from a node, or is it, `[B*M*N + 1]` bool.
        table: Blocks of each row in order of position, `[B*blocks + 1]` int32.
    """

    pools: tuple[tuple[Tensor, int, Tensor, int] | None, ...]
    windows: tuple[int, ...]
    length: Tensor
    depth: Tensor
    ancestors: Tensor
    table: Tensor

    @property
    def sizes(self) -> tuple[int, int, int]:
        """B, N and M: rows, nodes of a tree, and new nodes of a tree."""
        rows = self.length.shape[0] - 1
        nodes = (self.depth.shape[0] - 1) // rows
        return rows, nodes, (self.ancestors.shape[0] - 1) // (rows * nodes)

    @cached_property
    def slots(self) -> tuple[Tensor, Tensor]:
        """Slots of each row's committed tokens and nodes, `[B, S]`, and of the new nodes, `[B*M]`; on a CPU."""
        rows, nodes, new = self.sizes
        table, length = self.table[:-1].view(rows, -1).long(), self.length[:-1]
        offsets = torch.arange(int(length.max()) + nodes)  # counted along a row
        blocks = table.gather(1, (offsets // BLOCK_SIZE).clamp(max=table.shape[1] - 1).expand(rows, -1))
        slots = blocks.where(offsets // BLOCK_SIZE < table.shape[1], 0) * BLOCK_SIZE + offsets % BLOCK_SIZE  # [B, S]
        scratch = length[:, None] + torch.arange(nodes - new, nodes)
        return slots, slots.gather(1, scratch).flatten()

    @cached_property
    def masks(self) -> dict[tuple[int, torch.dtype], Tensor]:
        """Masks that were made already, by window and dtype; on a CPU."""
        return {}

    def mask(self, window: int, dtype: torch.dtype) -> Tensor:
        """Return the additive mask `[B, 1, M, S]` of a layer that looks back `window` positions, 0 for all."""
        if (window, dtype) not in self.masks:
            rows, nodes, new = self.sizes
            depth, ancestors = self.depth[:-1].view(rows, nodes), self.ancestors[:-1].view(rows, new, nodes)
            kind = AttentionKind(window=window or None)
            seen = visible_slots(self.length[:-1], depth, ancestors, self.slots[0].shape[1], kind)
            self.masks[window, dtype] = additive_mask(seen, dtype)
        return self.masks[window, dtype]


# A plan of a tree or of prompts, for models that hand no keyword arguments on to their attention.
RUNNING_PLAN: ContextVar[Any] = ContextVar("plan of the running forward")
