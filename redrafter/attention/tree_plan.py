"""Plans of forwards over token trees, as attention over a paged cache reads them."""

import itertools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from redrafter.attention.mask import AttentionKind, TreeSlots, additive_mask
from redrafter.features import ADAPTERS, ROPE_BY_LENGTH, Feature
from redrafter.kernels.attention_inputs import TOKENS_PER_CHUNK, AttentionInputs, TokenRows
from redrafter.kernels.block_size import BLOCK_SIZE

Attend: TypeAlias = Callable[[AttentionInputs], Tensor]
"""Attention in one layer: stores new keys and values, and returns each token's output, `[T, Hq, dv]`."""


@dataclass(frozen=True)
class PromptChunks:
    """Buffers for P chunks of P prompts, concatenated, of at most `P * TOKENS_PER_CHUNK` tokens together.

    All shapes depend only on P and the width of the block tables, so that a forward can be captured before its prompts
    are known.

    Attributes:
        tokens: Token ids of all chunks, `[P * TOKENS_PER_CHUNK]` int64; those past the last chunk are padding.
        starts: Index in `tokens` of the first token of each chunk and, last, of the padding, `[P + 1]` int64.
        lengths: Number of tokens of each prompt that are already cached, `[P]` int64.
        table: Blocks of each prompt in order of position, `[P, M]` int32; 0 where it has fewer.
        inputs: The number of each prompt that a feature reads, `[P]` int64, by feature, as in `ForwardBatch`.
    """

    tokens: Tensor
    starts: Tensor
    lengths: Tensor
    table: Tensor
    inputs: Mapping[Feature, Tensor]

    @classmethod
    def room(cls, count: int, blocks: int, device: torch.device) -> "PromptChunks":
        """Return empty buffers for P = `count` chunks, with M = `blocks` blocks in each block table."""
        with device:
            tokens, starts = torch.zeros(count * TOKENS_PER_CHUNK, dtype=torch.long), torch.zeros(count + 1).long()
            lengths, table = starts[:-1].clone(), torch.zeros(count, blocks, dtype=torch.int32)
            inputs = {feature: starts[:-1].clone() for feature in (ADAPTERS, ROPE_BY_LENGTH)}
            return cls(tokens=tokens, starts=starts, lengths=lengths, table=table, inputs=inputs)

    @property
    def count(self) -> int:
        """P, the number of chunks that the buffers have room for."""
        return len(self.lengths)

    @property
    def last(self) -> Tensor:
        """Index in `tokens` of the last token of each chunk, `[P]` int64; of any token where a chunk is empty."""
        return (self.starts[1:] - 1).clamp(min=0)

    def positions(self) -> Tensor:
        """Return the position of each token in its prompt, `[P * TOKENS_PER_CHUNK]` int64; padding counts from 0."""
        return self._placed()[1]

    def slots(self, back: int = 0) -> Tensor:
        """Return the slot of each token in the pools, `[P * TOKENS_PER_CHUNK]` int64; padding is in block 0.

        With `back`, the slot of the token this number of positions earlier, or of the prompt's first one.
        """
        chunk, position = self._placed()
        position = (position - back).clamp(min=0)
        table = torch.cat([self.table, torch.zeros_like(self.table[:1])])  # [P + 1, M]
        block = (position // BLOCK_SIZE).clamp(max=table.shape[1] - 1)
        return table[chunk, block].long() * BLOCK_SIZE + position % BLOCK_SIZE

    def by_token(self, x: Tensor) -> Tensor:
        """Expand values of the prompts, `[P]`, to their tokens, `[P * TOKENS_PER_CHUNK]`; 0 for padding."""
        return torch.cat([x, torch.zeros_like(x[:1])])[self._placed()[0]]

    def _placed(self) -> tuple[Tensor, Tensor]:
        """Return the chunk of each token, P for padding, and its position in that chunk's prompt, `[T]` int64 each."""
        index = torch.arange(len(self.tokens), device=self.tokens.device)
        chunk = torch.searchsorted(self.starts[1:], index, right=True)
        before = torch.cat([self.lengths, self.lengths.new_zeros(1)]) - self.starts  # [P + 1]
        return chunk, before[chunk] + index


@dataclass(frozen=True)
class ChunkEnds:
    """Holds the outputs of a forward at the last token of each of P chunks; at any token for an empty chunk.

    Attributes:
        logits: The target's logits, `[P, V]`.
        hidden: Its hidden states that a drafter reads, `[P, F]`.
    """

    logits: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class Plan:
    """Describes a forward to attention over a paged cache.

    Attributes:
        pools: Per layer, the pool and index of the keys that it attends to, then of the values; a pool is `[G, slots,
            heads, dim]`. None for a layer that attends to no tokens of the text.
        windows: Per layer, positions that a node looks back, 0 for all. They are observed from the model's masks, since
            not every model passes them to its attention function.
        tensors: The tokens of the forward.
        chunk_sizes: Per layer, the chunk size, 0 for no chunks; a node sees only its own chunk. Empty if no layer
            attends within chunks.
        invariant: Whether the order of all sums must depend on positions only, as in `invariant_attention`.
    """

    pools: tuple[tuple[Tensor, int, Tensor, int] | None, ...]
    windows: tuple[int, ...]
    tensors: TokenRows
    chunk_sizes: tuple[int, ...] = ()
    invariant: bool = False

    @cached_property
    def trees(self) -> "RowsPlan":
        """The rows of the trees, for attention on a CPU."""
        tensors = TokenRows(*self.tensors)  # layers of compressed-tensors pass on a plain tuple of its tensors
        (rows, nodes, new, _), starts = tensors.sizes, tensors.starts
        length, depth, ancestors, table = tensors.by_row()
        offsets = torch.arange(int(length.max()) + nodes, device=length.device)
        slots = _slots(table, offsets)
        at = torch.arange(nodes - new, nodes, device=length.device)
        scratch = slots.gather(1, length[:, None] + at)  # [B, M]
        tokens, index, scratch = slice(int(starts[-1])), None, scratch.flatten()
        if int(starts[-1]) < rows * new:
            index = (at - (nodes - new) < (starts[1:] - starts[:-1])[:, None]).flatten().nonzero()[:, 0]
            scratch = scratch[index]
        # Slots that no token sees are masked, but the mask does not hide a NaN left there by another sequence, so the
        # row's first slot is read instead.
        held = length + nodes if index is None else length + nodes - new + starts.diff()
        slots = slots.where(offsets < held[:, None], slots[:, :1])
        return RowsPlan(tokens, index, scratch, slots, length, depth, ancestors)

    @cached_property
    def chunks(self) -> list["RowsPlan"]:
        """The chunks with tokens, one row each, for attention on a CPU."""
        plans, rows = [], TokenRows(*self.tensors)
        spans = itertools.pairwise(rows.chunk_starts.tolist()[:-1])
        for (first, end), length, table in zip(spans, rows.chunk_lengths.tolist(), rows.by_chunk(), strict=False):
            if end > first:
                depth = torch.arange(end - first)
                slots = _slots(table[None], torch.arange(length + end - first))
                n, seen = torch.tensor([length]), depth[:, None] >= depth
                tokens, scratch = slice(first, end), slots[0, length:]
                plans.append(RowsPlan(tokens, None, scratch, slots, n, depth[None], ancestors=seen[None]))
        return plans


@dataclass(frozen=True)
class RowsPlan:
    """Rows that attention on a CPU computes in one call, with the slots that it reads and writes.

    Attributes:
        tokens: The tokens of the forward that are new nodes of the rows, in their order.
        index: Index of each of these among M new nodes of B rows; None if each row has all M.
        new_slots: Slots of the new nodes, one for each of `tokens`.
        slots: Slots of each row's committed tokens and nodes, `[B, S]`.
        length: Committed tokens of each row, `[B]` int64.
        depth: Depth of each node, `[B, N]` int64.
        ancestors: Whether each new node descends from a node, or is it, `[B, M, N]` bool.
        masks: Masks created so far, by window, chunk size, first token, dtype and group.
    """

    tokens: slice
    index: Tensor | None
    new_slots: Tensor
    slots: Tensor
    length: Tensor
    depth: Tensor
    ancestors: Tensor
    masks: dict[tuple[int, int, int, torch.dtype, int], Tensor] = field(default_factory=dict)

    def by_row(self, x: Tensor) -> Tensor:
        """Regroup values of the tokens, `[T, ...]`, by row, `[B, M, ...]`; 0 for nodes that a row does not have."""
        shape = self.ancestors.shape[:2]
        x = x[self.tokens]
        if self.index is not None:
            x = x.new_zeros(shape.numel(), *x.shape[1:]).index_copy_(0, self.index, x)
        return x.unflatten(0, shape)

    def flat(self, x: Tensor) -> Tensor:
        """Return values of the new nodes, `[B, M, ...]`, in the order of the tokens."""
        return x.flatten(0, 1) if self.index is None else x.flatten(0, 1)[self.index]

    def mask(self, window: int, chunk_size: int, first: int, dtype: torch.dtype, group: int) -> Tensor:
        """Return a layer's additive mask `[B, 1, G M, S]`, repeated G times; a window or chunk of 0 is no limit.

        Of committed tokens, those from `first` on are seen.
        """
        key = window, chunk_size, first, dtype, group
        if key not in self.masks:
            kind = AttentionKind(window or None, chunk_size or None)
            seen = TreeSlots(self.length, self.depth, self.ancestors, self.slots.shape[1]).seen(kind)
            if first:
                slots = torch.arange(seen.shape[2], device=seen.device)
                seen = seen & ((slots >= first) | (slots >= self.length[:, None]))[:, None]
            self.masks[key] = additive_mask(seen, dtype).repeat(1, 1, group, 1)
        return self.masks[key]


def _slots(table: Tensor, offsets: Tensor) -> Tensor:
    """Return the slots `[B, S]` of offsets `[S]` along rows with blocks `[B, M]`; in block 0 past a row's last one."""
    index, width = offsets // BLOCK_SIZE, table.shape[1]
    blocks = table.long().gather(1, index.clamp(max=width - 1).expand(len(table), -1))
    return blocks.where(index < width, 0) * BLOCK_SIZE + offsets % BLOCK_SIZE


# The schema of all operators of attention; `AttentionInputs.from_arguments` gathers their arguments.
_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor keys, SymInt key_layer, Tensor values, SymInt value_layer, "
    "Tensor length, Tensor starts, Tensor depth, Tensor ancestors, Tensor table, Tensor chunk_starts, "
    "Tensor chunk_lengths, Tensor chunk_table, float scale, SymInt window, float softcap, Tensor? sinks, "
    "SymInt chunk_size=0, SymInt first=0, bool sees_later=False) -> Tensor"
)


def attention_operator(name: str, attend: Attend, kernel: Attend | None) -> Callable[..., Tensor]:
    """Make an opaque operator for compilers, from a function for any device and a kernel for GPUs."""

    def gathering(attend: Attend) -> Callable[..., Tensor]:
        return lambda *args, **settings: attend(AttentionInputs.from_arguments(*args, **settings))

    # No mutation is declared, though the pools are written: only these operators read a pool, and they run in order
    # because each layer needs the one before. With a declaration, the compiler might copy a whole pool.
    operator = torch.library.custom_op(f"redrafter::{name}", gathering(attend), mutates_args=(), schema=_SCHEMA)
    operator.register_fake(gathering(AttentionInputs.new_output))
    if kernel is not None:
        operator.register_kernel("cuda")(gathering(kernel))
    return operator


# Plan of a forward over a tree or prompts, for models that do not pass keyword arguments on to their attention.
RUNNING_PLAN: ContextVar[Any] = ContextVar("plan of the running forward")
