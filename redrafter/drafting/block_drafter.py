"""The base of drafters that compute all positions of a block in one pass, and their proposer.

The layers attend to keys and values of the committed tokens, which are computed when the target computes the tokens and
stored as heads of one layer, and to the block itself. A subclass defines what enters the block, and scores its output.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from redrafter.cache.kv_cache import KVCache
from redrafter.drafting.decoder_parts import Sines, rope_of
from redrafter.drafting.dflash_config import DFlashConfig
from redrafter.drafting.dflash_layers import BlockLayer, CopiedContext, PagedContext, ReadLayer, seen_by_blocks
from redrafter.drafting.drafter_model import compile_once, drafter_layer, mark_dynamic
from redrafter.drafting.paged_entries import PagedEntries, reads_pages
from redrafter.drafting.proposer import SearchProposer, State
from redrafter.drafting.text_drafters import GivenTexts, ReadAt, TrainableDrafter
from redrafter.errors import ArgumentError
from redrafter.model.forward_batch import DrafterLayer
from redrafter.model.layer_compiler import LayerCompiler
from redrafter.model.target import Target
from redrafter.model.varlen_forward import COMPILE_OPTIONS, CUTS

# Positions of blocks that a training computes at once. A GPU needs large parts, as each launches some hundred kernels;
# the memory holds all layers of one part.
POSITIONS_AT_ONCE = 8192
MASK_BYTES = 5  # of a position and an entry that it may see: a mask, and its copy in float32


class BlockContext(NamedTuple):
    """Holds the inputs of a block of B rows, in addition to its pending tokens.

    Attributes:
        length: Committed tokens of each row, `[B]` int64.
        layers: What each layer attends to before the block, in a paged cache; or a function that reads it.
    """

    length: Tensor
    layers: tuple[PagedEntries, ...] | ReadLayer


class BlockDrafter(TrainableDrafter):
    """The layers of a drafter of blocks.

    Attributes:
        layers: The decoder layers, in order.
        norm: The norm after them.
    """

    config: DFlashConfig
    layers: nn.ModuleList
    norm: nn.RMSNorm

    @property
    def stack(self) -> Sequence[BlockLayer]:
        """The layers, in order."""
        return list(self.layers)  # type: ignore[arg-type]

    def stored_layer(self, target: Target, compiled: bool) -> DrafterLayer:
        """Return the layer that the drafter stores: keys and values of all its layers, as heads of one layer."""
        heads = self.config.num_layers * self.config.num_key_value_heads
        rope = rope_of(self.config, target.device)  # of which a compiled function cannot copy anything to the device
        compute = partial(compile_once(_remember) if compiled else _remember, self, rope)
        return drafter_layer(self, target, heads, self.config.head_dim, compute, compiled=compiled)

    def check_search(self, target: Target, depth: int) -> None:
        """Raise `ArgumentError` if a block drafts fewer tokens than `depth`."""
        if depth > self.config.drafts:
            raise ArgumentError(
                f"draft_len_per_beam={depth} is more than the {self.config.drafts} tokens that a block of this drafter "
                "holds"
            )

    def seen_in(self, layer: int, committed: Tensor, there: Tensor, position: Tensor) -> Tensor:
        """Return which entries the positions of blocks attend to in a layer; see `seen_by_blocks`."""
        attention = self.stack[layer].self_attn
        return seen_by_blocks(committed, there, position, attention.window, sees_later=attention.sees_later)

    def fuse_hidden(self, hidden: Tensor) -> Tensor:
        """Fuse what the drafter reads of the target's hidden states `[..., F]`, `[..., D]`."""
        raise NotImplementedError

    def open_block(self, pending: Tensor, hidden: Tensor, table: nn.Module) -> Tensor:
        """Return the input of the first layer at all positions of a block, `[..., Q, D]`.

        Args:
            pending: The pending token of each row, `[..., 1]` int64.
            hidden: The target's hidden state that produced it, as `fuse_hidden` returns it, `[..., D]`.
            table: The target's embedding table.
        """
        raise NotImplementedError

    def remember(self, hidden: Tensor, position: Tensor | Sines) -> tuple[Tensor, Tensor]:
        """Compute keys and values of committed tokens, `[..., L H, d]` each: the heads of all layers in order.

        Args:
            hidden: Their hidden states as `fuse_hidden` returns them, `[..., D]`.
            position: Their positions, `[...]` int64, or the sines of these.
        """
        sides = zip(*(layer.self_attn.remember(hidden, position) for layer in self.stack), strict=True)
        keys, values = (torch.cat(side, dim=-2) for side in sides)
        return keys, values

    def read_texts(self, tokens: Tensor, hidden: Tensor, embedding: Tensor) -> ReadAt:
        """Return a function that reads the keys and values before positions of sequences."""
        position, heads = torch.arange(tokens.shape[1], device=tokens.device), self.config.num_key_value_heads
        keys, values = self.remember(self.fuse_hidden(hidden), position.expand_as(tokens))  # [B, T, L H, d]

        def at(row: Tensor, length: Tensor) -> BlockContext:
            committed = position < length[:, None, None]  # [A, 1, T]

            def read_layer(layer: int, own: Tensor) -> CopiedContext:
                part = slice(layer * heads, (layer + 1) * heads)
                seen = self.seen_in(layer, committed, position[None], own[:, None])
                return CopiedContext(keys[row, :, part], values[row, :, part], seen)

            return BlockContext(length, read_layer)

        return at

    def context_bytes(self, length: int, beams: int) -> int:
        """Return the bytes of a layer's copies of a sequence's entries, and of a block's scores."""
        config = self.config
        stored = 4 * config.num_key_value_heads * config.head_dim * self.dtype.itemsize
        scores = 12 * config.block_size * config.num_attention_heads
        return length * (stored + scores) + 4 * config.drafts * config.vocab_size

    def check_unroll(self, steps: int) -> None:
        """Raise `ArgumentError` for more steps than a block drafts; see `TrainableDrafter`."""
        if steps > self.config.drafts:
            raise ArgumentError(
                f"--draft-len {steps} is more than the {self.config.drafts} tokens that a block of this drafter holds"
            )

    def fill_given(self, texts: GivenTexts, fused: Tensor) -> Tensor:
        """Fill a block at each of the A anchors of given texts, as the search does, `[A, Q, D]`.

        `fused` is what `fuse_hidden` returns for the texts' features, `[B, T, D]`. Blocks attend to the committed
        tokens before their anchor and to themselves. They are filled in parts, and filled again for the gradients on a
        GPU, so that of all of them only the hidden states are kept.
        """
        tokens, (rows, length) = texts.tokens, texts.tokens.shape
        index = torch.arange(length, device=tokens.device)
        sines = Sines.at(index, *rope_of(self.config, index.device))
        keys, values = self.remember(fused, sines)  # [B, T, L H, d]
        starts = self._find_starts(texts)
        # Blocks are filled at the same columns of all rows. Finding those with an anchor would make the host wait for a
        # GPU, where most columns have one.
        every = tokens.is_cuda or not len(texts.anchors)
        columns = index if every else (texts.anchors % length).unique()  # [P]
        filled = []
        parts = _split_evenly(columns, self._blocks_at_once(rows, length))
        for part in parts:
            arguments = texts, fused, keys, values, starts, part
            if tokens.is_cuda:
                filled.append(checkpoint(self._fill_columns, *arguments, use_reentrant=False))
            else:
                filled.append(self._fill_columns(*arguments))
        # Columns that fill the last part follow the others and repeat the last one: the first of equal ones is read.
        columns = torch.cat(parts)
        place = texts.anchors // length * len(columns) + torch.searchsorted(columns, texts.anchors % length)
        return torch.cat(filled, dim=1).flatten(0, 1).index_select(0, place)

    def _find_starts(self, texts: GivenTexts) -> Tensor:
        """Return the first token that blocks attend to of each token's own text, `[B, T]` int64."""
        starts = torch.zeros_like(texts.tokens)
        if texts.segment is not None:
            opens = pad(texts.segment[:, 1:] != texts.segment[:, :-1], (1, 0))
            index = torch.arange(texts.tokens.shape[1], device=starts.device)
            starts = torch.where(opens, index, starts).cummax(dim=1).values
        return starts

    def _blocks_at_once(self, rows: int, length: int) -> int:
        """Return how many blocks of each row of a length are filled at once."""
        # The products with positions of other blocks are in vain, so a row's blocks are no longer than its text.
        size = self.config.block_size
        return max(min(POSITIONS_AT_ONCE // (rows * size), length // size), 1)

    def _fill_columns(
        self, texts: GivenTexts, fused: Tensor, keys: Tensor, values: Tensor, starts: Tensor, columns: Tensor
    ) -> Tensor:
        """Fill blocks whose anchors are at columns `[c]` int64 of each text, and return their states, `[B, c, Q, D]`.

        Args:
            texts: The texts.
            fused: As in `fill_given`.
            keys: Keys of their tokens in all layers, `[B, T, L H, d]`.
            values: Values likewise.
            starts: What `_find_starts` returned, `[B, T]`.
            columns: Columns of the anchors.
        """
        assert texts.table is not None
        (rows, length), heads = texts.tokens.shape, self.config.num_key_value_heads
        index = torch.arange(length, device=columns.device)
        committed = (index <= columns[:, None]) & (index >= starts[:, columns, None])  # [B, c, T]
        pending = texts.tokens[:, (columns + 1).clamp(max=length - 1)]  # [B, c]

        def read_layer(layer: int, position: Tensor) -> CopiedContext:
            part = slice(layer * heads, (layer + 1) * heads)
            seen = self.seen_in(layer, committed, index[None], position.unflatten(0, (rows, -1)))
            return CopiedContext(keys[:, :, part], values[:, :, part], seen)

        x = self.open_block(pending.flatten()[:, None], fused[:, columns].flatten(0, 1), texts.table)
        return self.fill(x, (columns + 1).repeat(rows), read_layer).unflatten(0, (rows, -1))

    def unroll_bytes(self, rows: int, length: int, steps: int) -> dict[str, float]:
        """Return about how many bytes `unroll` keeps on a GPU; see `TrainableDrafter.unroll_bytes`."""
        config, layers, count = self.config, self.config.num_layers, self.config.block_size
        stored = 2 * layers * config.num_key_value_heads * config.head_dim  # keys and values of a token
        kept = 4 * (2 * stored + (count + 3 * steps) * config.hidden_size)
        own = count * self._blocks_at_once(rows, length)  # positions of a row that are filled at once
        attended = config.num_attention_heads * config.head_dim
        position = 4 * (10 * config.hidden_size + 4 * config.intermediate_size + 4 * attended)  # without masks
        copies = config.num_attention_heads // config.num_key_value_heads
        return {
            "the drafter's states": rows * (length * kept + own * layers * position),
            "its attention to the texts": MASK_BYTES * rows * layers * copies * own * (length + own),
        }

    def fill(self, x: Tensor, length: Tensor, read: ReadLayer, rope: tuple[Tensor, float] | None = None) -> Tensor:
        """Apply the layers to a block of each row, and return the hidden states of all its positions, `[B, Q, D]`.

        Args:
            x: What `open_block` returned, `[B, Q, D]`.
            length: Committed tokens of each row, `[B]` int64.
            read: Returns what the layer of a number attends to.
            rope: What `rope_of` returns, which a compiled caller looks up before; None to look it up here.
        """
        position = length[:, None] + torch.arange(x.shape[1], device=x.device)
        sines = Sines.at(position, *(rope or rope_of(self.config, length.device)))
        for number, layer in enumerate(self.stack):
            x = layer(x, sines, read(number, position))
        hidden: Tensor = self.norm(x)
        return hidden


def _split_evenly(columns: Tensor, most: int) -> tuple[Tensor, ...]:
    """Split columns `[P]` into parts of one size, at most `most`; the last is filled with copies of the last column.

    Compiled attention has code for each size of a part.
    """
    count = -(-len(columns) // max(most, 1))
    size = -(-len(columns) // count)
    filled = torch.arange(count * size, device=columns.device).clamp(max=len(columns) - 1)
    return columns[filled].split(size)


@dataclass(frozen=True)
class BlockProposer(SearchProposer[BlockContext]):
    """Drafts with a block drafter; has the attributes of `SearchProposer`."""

    drafter: BlockDrafter

    @property
    def positions(self) -> int:
        """Positions of a block that drafts depend on: all of it, or where none sees later ones, the first ones."""
        config = self.drafter.config
        return self.depth + config.block_size - config.drafts if config.causal == "all" else config.block_size

    @cached_property
    def scratch_slots(self) -> int:
        """Slots after a row's committed tokens that a step writes to: verification, or before it the block."""
        return max(self.nodes, self.positions)

    def read_context(self, state: State, cache: KVCache) -> BlockContext:
        """Return the keys and values of the rows' committed tokens where they are, or a function that copies them."""
        if reads_pages(cache):
            later = any(layer.self_attn.sees_later for layer in self.drafter.stack)
            whole = PagedEntries.from_cache(cache, state.length, first=0, sees_later=later)
            heads = self.drafter.config.num_key_value_heads
            sides = zip(*(x.split(heads, dim=2) for x in (whole.keys, whole.values)), strict=True)
            return BlockContext(state.length, tuple(whole._replace(keys=k, values=v) for k, v in sides))
        return BlockContext(state.length, partial(self.read_layer, cache, state.length))

    def fill(self, state: State, hidden: Tensor, context: BlockContext) -> Tensor:
        """Fill a block of each row, and return the hidden states of all its positions, `[B, Q, D]`.

        Args:
            state: The rows.
            hidden: What `BlockDrafter.open_block` reads of their hidden states.
            context: What `read_context` returned.
        """
        drafter, table, pending, (length, layers) = self.drafter, self.target.embedding, state.pending, context
        if callable(layers):
            return drafter.fill(drafter.open_block(pending, hidden, table)[:, : self.positions], length, layers)
        fill = _fill_paged
        if self.compiled:
            fill = _compiled_fill()
            mark_dynamic((pending, hidden, length, layers[0].length, layers[0].table), 0)
        return fill(
            drafter, table, pending, hidden, length, layers, rope_of(drafter.config, length.device), self.positions
        )

    def read_layer(self, cache: KVCache, length: Tensor, layer: int, position: Tensor) -> CopiedContext:
        """Return what a layer attends to, of rows with `length` `[B]` int64 committed tokens; see `ReadLayer`."""
        window, heads = self.drafter.stack[layer].self_attn.window, self.drafter.config.num_key_value_heads
        size = cache.window if window is None else min(window, cache.window)
        there = torch.arange(size, device=length.device).expand(len(length), -1)
        if size < cache.window:
            there = there + (length - size)[:, None]
        committed = ((there >= 0) & (there < length[:, None]))[:, None]
        part = slice(layer * heads, (layer + 1) * heads)
        entries = cache.read_drafter_layer(there.clamp(min=0), part)
        return CopiedContext(*entries, self.drafter.seen_in(layer, committed, there, position[:, None]))


def _fill_paged(
    drafter: BlockDrafter,
    table: nn.Module,
    pending: Tensor,
    hidden: Tensor,
    length: Tensor,
    layers: tuple[PagedEntries, ...],
    rope: tuple[Tensor, float],
    size: int,
) -> Tensor:
    """Fill the first positions of a block of each row, whose layers attend to entries in a paged cache."""
    seen = torch.ones(size, size, dtype=torch.bool, device=length.device)
    depth = torch.arange(size, device=length.device).expand(len(length), -1)
    sees_later = [layer.self_attn.sees_later for layer in drafter.stack]
    by_direction = {
        later: layers[0].rows((seen if later else seen.tril()).expand(len(length), -1, -1), depth)
        for later in (False, True)
        if later in sees_later
    }

    def read_entries(number: int, _: Tensor) -> PagedContext:
        return PagedContext(layers[number], by_direction[sees_later[number]])

    return drafter.fill(drafter.open_block(pending, hidden, table)[:, :size], length, read_entries, rope)


@cache
def _compiled_fill() -> Callable[..., Tensor]:
    """Return `_fill_paged` compiled, once for all proposers, and layers that are alike once for all of these."""
    from torch._inductor.compile_fx import compile_fx  # takes seconds to import

    inductor: Any = partial(compile_fx, config_patches=COMPILE_OPTIONS)
    return torch.compile(_fill_paged, fullgraph=True, backend=LayerCompiler(CUTS, inductor))


def _remember(
    drafter: BlockDrafter, rope: tuple[Tensor, float], ids: Tensor, positions: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    return drafter.remember(drafter.fuse_hidden(hidden), Sines.at(positions, *rope))
