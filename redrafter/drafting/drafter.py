"""The recurrent drafter: a small head that drafts a few tokens ahead from the target's last hidden state.

Zhang et al. 2024, "Recurrent Drafter for Fast Speculative Decoding in Large Language Models" (arXiv 2403.09919).
Training and drafting call the same `RecurrentDrafter.step`, so that both compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from redrafter.cache.kv_cache import KVCache
from redrafter.cache.paged import PagedCache
from redrafter.drafting.context_attention import ContextAttention, ContextWindow, PackedContext
from redrafter.drafting.decoder_parts import fuse_outputs, gated_state
from redrafter.drafting.drafter_config import DrafterConfig
from redrafter.drafting.drafter_model import compile_once, drafter_layer, mark_dynamic, partial_linear
from redrafter.drafting.drafter_types import register_drafter
from redrafter.drafting.proposer import SearchProposer, State
from redrafter.drafting.text_drafters import GivenTexts, ReadAt, TrainableDrafter
from redrafter.kernels.linear_operators import has_thin_kernel, residual_layer
from redrafter.model.forward_batch import DrafterLayer
from redrafter.model.target import Target
from redrafter.sampling.sampler import Sampler
from redrafter.tree.beam_search import Expand, PartOfScores

TABLE_SHARE = 1 / 32  # maximum share of a GPU's memory for the table of the cell's products with embeddings
TABULATED_AT_ONCE = 8192  # ids


class DraftStart(NamedTuple):
    """The target's hidden state, and its contribution to the products of every step of a draft, computed once.

    Two products of each step read the hidden state and the step's own inputs. A product of joined inputs is the sum of
    a product of each, so the hidden state's term of both is the same in every step.

    Attributes:
        hidden: The target's hidden state that produced the pending token, fused, `[..., D]`.
        gate: Its term of the gated cell's product, including the bias, `[..., 2D]`; None in other cells.
        exit: Its term of the first product after the cell, including the bias, `[..., E]`; None if that is the head.
    """

    hidden: Tensor
    gate: Tensor | None
    exit: Tensor | None


class _Residual(nn.Module):
    """The residual layer `x + SiLU(W x + b)`."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to `[..., E]`."""
        layer = self.linear
        if type(layer) is nn.Linear and has_thin_kernel(layer.weight) and not torch.is_grad_enabled():
            return residual_layer(x, layer.weight, layer.bias)
        return x + silu(layer(x))


@register_drafter()
class RecurrentDrafter(TrainableDrafter):
    """The drafter's recurrence and head; the target's embedding table is shared and not stored.

    Attributes:
        context: Attention to the committed tokens; None without one.
        embedded: The cell's product with the embedding of every id, `[V, D]`, or `[V, 2D]` in a gated cell, after
            `tabulate`; None before.
    """

    splits_head = True
    config_class = DrafterConfig
    config: DrafterConfig

    def __init__(self, config: DrafterConfig):
        """Make a drafter with random weights; see `DrafterModel`."""
        super().__init__(config)
        hidden, exit_dim = config.hidden_size, config.exit_dim
        self.input_proj = nn.Linear(2 * hidden, exit_dim) if exit_dim != 2 * hidden else None
        self.layers = nn.ModuleList(_Residual(exit_dim) for _ in range(config.num_draft_layers))
        rank = config.head_rank or exit_dim
        self.head_proj = nn.Linear(exit_dim, rank, bias=False) if config.head_rank else None
        self.lm_head: nn.Linear = nn.Linear(rank, config.num_draft_ids, bias=False)
        self.fuse = nn.Linear(self.feature_size, hidden) if config.target_layers else None
        if config.rnn and config.recurrence == "gated":
            self.rnn_gate = nn.Linear(3 * hidden, 2 * hidden)
        elif config.rnn:
            self.rnn_u = nn.Linear(hidden, hidden)
            self.rnn_w = nn.Linear(hidden, hidden, bias=False)
        self.context = ContextAttention(config) if config.context_window else None
        self.embedded: Tensor | None
        self.register_buffer("embedded", None, persistent=False)
        self.post_init()

    @property
    def unquantized(self) -> nn.Module | None:  # type: ignore[override]
        """Its attention to the committed tokens, which is small."""
        return self.context

    def stored_layer(self, target: Target, compiled: bool) -> DrafterLayer | None:
        """Return the layer that the drafter stores for its attention; None without one."""
        if self.context is None:
            return None
        compute = partial(compile_once(_remember) if compiled else _remember, self, target.embedding)
        heads, width = self.config.context_kv_heads, self.config.context_head_dim
        return drafter_layer(self, target, heads, width, remember=compute, compiled=compiled)

    def prepare(self, target: Target) -> None:
        """Tabulate the cell's product with embeddings on a GPU, if the table takes a small part of its memory.

        An existing table is recomputed from the current weights.
        """
        super().prepare(target)
        wanted = self.embedded is not None
        if target.device.type == "cuda" and self.config.rnn and not wanted:
            memory = torch.cuda.get_device_properties(target.device).total_memory
            size = self.config.vocab_size * self._cell[0].out_features * target.dtype.itemsize
            wanted = size <= memory * TABLE_SHARE
        if wanted:
            self.tabulate(target.embedding)

    @property
    def _cell(self) -> tuple[nn.Linear, slice]:
        """The product of the cell that reads embeddings, and the columns of its embedding input."""
        gated = self.config.recurrence == "gated"
        return self.rnn_gate if gated else self.rnn_w, slice(self.config.hidden_size)

    @torch.no_grad()
    def tabulate(self, embedding: nn.Module) -> None:
        """Tabulate the cell's product with all embeddings, so that drafts look it up.

        A draft then reads half as much of the cell, or a third less of a gated one. `train` drops the table.

        Args:
            embedding: The target's embedding table.
        """
        layer, columns = self._cell
        ids = torch.arange(self.config.vocab_size, device=self.device)
        table = self.embedded  # reused if it exists, as captured steps contain its address
        if table is None:
            table = torch.empty(len(ids), layer.out_features, dtype=embedding(ids[:1]).dtype, device=self.device)
        # In parts: the embeddings of all ids at once would take as much memory as the table.
        for part in ids.split(TABULATED_AT_ONCE):
            table[part] = partial_linear(layer, embedding(part), columns, with_bias=False)
        self.embedded = table

    def part_reads(self, depth: int) -> Mapping[str, float]:
        """Return how often a draft reads parts of the drafter; see `PricedDrafter.part_reads`.

        What depends on the target's hidden state alone is computed once, and products that were tabulated not at all.
        The first step has no state. Entries of committed tokens are computed in the target's forward.
        """
        embeddings = 0 if self.embedded is not None else depth
        first = "input_proj." if self.input_proj is not None else "layers.0."
        gate = (embeddings + (depth - 1) + 1) / 3  # of the embedding, the state and the hidden state
        own = {"rnn_gate.": gate, "rnn_w.": embeddings, "rnn_u.weight": depth - 1, first: (depth + 1) / 2}
        return {**super().part_reads(depth), **own, "fuse.": 1, "context.key.": 0, "context.value.": 0}

    @property
    def feature_size(self) -> int:
        """F, width of the target's hidden states that `fuse_hidden` reads."""
        return self.config.hidden_size * (1 + len(self.config.target_layers))

    @property
    def first_product(self) -> nn.Linear | None:
        """The first product after the recurrence, which reads `[h; s]`; None where that is the head's."""
        if self.input_proj is not None:
            return self.input_proj
        return self.layers[0].linear if self.layers else None  # type: ignore[return-value]

    def fuse_hidden(self, hidden: Tensor) -> Tensor:
        """Fuse the target's last hidden state with the outputs of `target_layers`, once for all steps of a draft.

        The outputs are RMS-normalised first.

        Args:
            hidden: The last hidden state, after the final norm, and then the outputs of `target_layers`, `[..., F]`.

        Returns:
            The hidden state that `step` reads, `[..., D]`.
        """
        if self.fuse is None:
            return hidden
        return fuse_outputs(hidden, self.fuse, self.config.hidden_size, self.config.rms_norm_eps)

    def begin(self, hidden: Tensor) -> DraftStart:
        """Compute, once for all steps of a draft, the terms that depend only on the target's hidden state.

        Args:
            hidden: The target's hidden state that produced the pending token, as `fuse_hidden` returns it, `[..., D]`.
        """
        gate, first = None, self.first_product
        if self.config.rnn and self.config.recurrence == "gated":
            gate = partial_linear(self.rnn_gate, hidden, slice(-hidden.shape[-1], None), with_bias=True)
        if first is None:
            return DraftStart(hidden, gate, None)
        return DraftStart(hidden, gate, partial_linear(first, hidden, slice(hidden.shape[-1]), with_bias=True))

    def step(
        self,
        embedding: Tensor,
        state: Tensor | None,
        start: DraftStart,
        read: Callable[[Tensor], Tensor] | None = None,
        embedded: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Make one step, for the arguments of `advance`; returns the next token's logits `[..., V']` and the state."""
        x, state = self.advance(embedding, state, start, read, embedded)
        return self.score(x), state

    forward = step

    def advance(
        self,
        embedding: Tensor,
        state: Tensor | None,
        start: DraftStart,
        read: Callable[[Tensor], Tensor] | None = None,
        embedded: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Make one step of the recurrence, without its last product.

        Args:
            embedding: The target's embedding of the last token, `[..., D]`.
            state: The recurrent state, `[..., D]`; None at the first step.
            start: Result of `begin` for this draft.
            read: Returns values `[..., D]` that new states `[..., D]` read from the committed tokens; None to read
                none.
            embedded: The cell's product with the embedding, from the table; None to compute it.

        Returns:
            The input of `lm_head`, `[..., R]`, and the new state `[..., D]`.
        """
        # 1. The recurrence, whose equations are in `DrafterConfig`.
        config = self.config
        if not config.rnn:
            state = embedding if state is None else state + embedding
        elif start.gate is not None:
            if embedded is None:
                inputs = embedding if state is None else torch.cat([embedding, state], dim=-1)  # [..., D or 2D]
                embedded = partial_linear(self.rnn_gate, inputs, slice(inputs.shape[-1]), with_bias=False)
            elif state is not None:
                columns = slice(state.shape[-1], 2 * state.shape[-1])
                embedded = embedded + partial_linear(self.rnn_gate, state, columns, with_bias=False)
            state = gated_state(embedded + start.gate, state)
        else:
            product = embedded
            if product is None:
                product = partial_linear(self.rnn_w, embedding, slice(None), with_bias=False)
            if state is not None:
                product = product + partial_linear(self.rnn_u, state, slice(None), with_bias=True)
            elif config.recurrence == "apple":  # Apple's recurrence adds the bias at the first step too
                product = product + self.rnn_u.bias
            state = silu(product) if config.recurrence == "apple" else product

        # 2. The values read from committed tokens inform only this step: the next one starts from the state itself.
        informed = state if read is None else state + read(state)

        # 3. The layers up to the head. `start` has the hidden state's term of the first product.
        x, first, layers = torch.cat([start.hidden.expand_as(state), informed], dim=-1), self.first_product, self.layers
        if first is not None and start.exit is not None:
            product = partial_linear(first, informed, slice(state.shape[-1], None), with_bias=False) + start.exit
            x, layers = (product, layers) if self.input_proj is not None else (x + silu(product), layers[1:])
            for layer in layers:
                x = layer(x)
        if self.head_proj is not None:
            x = partial_linear(self.head_proj, x, slice(None), with_bias=False)
        return x, state

    def unroll(self, texts: GivenTexts) -> Tensor:
        """Unroll the recurrence over given sequences."""
        features, embedding, anchors, context = texts.features, texts.embedding, texts.anchors, None
        if self.context is None:
            hidden = self.fuse_hidden(features.flatten(0, 1)[anchors])  # [A, D]
        else:
            fused = self.fuse_hidden(features)  # [B, T, D]: all tokens have keys, not only anchors
            hidden = fused.flatten(0, 1).index_select(0, anchors)
            context = PackedContext(
                self.context, self.config, hidden=fused, embedding=embedding, segment=texts.segment, anchors=anchors
            )
        flat, state, start, head_inputs = embedding.flatten(0, 1), None, self.begin(hidden), []
        for k in range(texts.position.shape[1]):
            read = None if context is None else partial(context.attend, k)
            x, state = self.advance(flat[texts.position[:, k]], state, start, read)
            head_inputs.append(x)
        return torch.stack(head_inputs, dim=1)

    def unroll_bytes(self, rows: int, length: int, steps: int) -> dict[str, float]:
        """Return about how many bytes `unroll` keeps."""
        config, positions = self.config, rows * length
        parts = {"the drafter's states": positions * 4 * steps * config.exit_dim * (2 + config.num_draft_layers)}
        if config.context_window is not None:
            by_step = 3 * config.hidden_size + 4 * config.context_heads * config.context_head_dim  # states and queries
            keys = 5 * config.hidden_size + 4 * config.context_kv_heads * config.context_head_dim  # and what makes them
            masks = (1 + steps) * length  # a mask, and its copy for each step
            parts["its attention to the texts"] = positions * (4 * (steps * by_step + keys) + masks)
        return dict(parts)

    def read_texts(self, tokens: Tensor, hidden: Tensor, embedding: Tensor) -> ReadAt | None:
        """Return a function that reads the windows at positions of sequences."""
        if self.context is None:
            return None
        position = torch.arange(tokens.shape[1], device=tokens.device)
        keys, values = self.context.remember(self.fuse_hidden(hidden), embedding, position)
        size = min(self.config.context_window or 0, tokens.shape[1] - 1)  # no sequence has more pairs

        def at(row: Tensor, length: Tensor) -> ContextWindow:
            return ContextWindow.read_last(length, size, lambda n: (keys[row[:, None], n], values[row[:, None], n]))

        return at

    def context_bytes(self, length: int, beams: int) -> int:
        """Return the bytes of a window, which is copied once, and of its scores."""
        config = self.config
        stored = 4 * config.context_kv_heads * config.context_head_dim * self.dtype.itemsize
        return min(config.context_window or 0, length) * (stored + 12 * beams * config.context_heads)

    def train(self, mode: bool = True) -> RecurrentDrafter:
        """Set training or evaluation mode; training drops the table that `tabulate` made."""
        if mode:
            self.embedded = None
        super().train(mode)
        return self


@dataclass(frozen=True)
class RecurrentProposer(SearchProposer[ContextWindow | None]):
    """Drafts with a recurrent drafter; the attributes are those of `SearchProposer`."""

    drafter: RecurrentDrafter

    def read_context(self, state: State, cache: KVCache) -> ContextWindow | None:
        """Return the keys and values that drafts attend to; None for a drafter without `context_window`."""
        size = self.drafter.config.context_window
        if not size:
            return None
        read = ContextWindow.read_last
        if self.compiled and isinstance(cache, PagedCache):
            read = compile_once(read)
            mark_dynamic((state.length,), 0)
            mark_dynamic((cache.table,), 0, 1)
        return read(state.length, min(size, cache.window), cache.read_drafter_layer)  # a row has no more

    def scores(self, state: State, sampler: Sampler, noise: Tensor | None, context: ContextWindow | None) -> Expand:
        """Return the function that scores the next tokens of every beam; see `SearchProposer.scores`."""
        drafter, carried = self.drafter, None  # [B, w, D], the recurrent state of each beam
        begin, advance = _begin, _advance
        if self.compiled:
            begin, advance = compile_once(_begin), compile_once(_advance)
            mark_dynamic((state.hidden,), 0)
        start = begin(drafter, state.hidden)
        windows: list[ContextWindow | None] = [context] * self.depth
        if context is not None:
            steps = torch.arange(self.depth, device=context.length.device)
            windows = [context._replace(length=length) for length in context.length + steps[:, None]]
        if self.compiled:
            mark_dynamic(start, 0)
        if self.compiled and context is not None:
            mark_dynamic((context.keys, context.bias), 0, 3)
            mark_dynamic((context.values,), 0, 2)

        def expand(k: int, tokens: Tensor, sources: Tensor) -> Tensor | PartOfScores:
            nonlocal carried
            window = windows[k]
            if carried is not None and carried.shape[1] != tokens.shape[1]:
                # Only the second step continues another number of beams, one: copying it for each beam avoids another
                # compilation.
                carried = carried.repeat(1, tokens.shape[1], 1)
            if self.compiled:
                mark_dynamic((tokens, sources, carried), 0, 1)
                mark_dynamic((window and window.length,), 0)
            logits, carried = advance(drafter, self.target.embedding, tokens, sources, carried, start, window)
            return drafter.draft_scores(logits, sampler, noise, k)

        return expand


def _begin(drafter: RecurrentDrafter, hidden: Tensor) -> DraftStart:
    return drafter.begin(drafter.fuse_hidden(hidden)[:, None])


def _advance(
    drafter: RecurrentDrafter,
    embedding: nn.Module,
    tokens: Tensor,
    sources: Tensor,
    carried: Tensor | None,
    start: DraftStart,
    window: ContextWindow | None,
) -> tuple[Tensor, Tensor]:
    """Make one drafter step for every beam, from the recurrent state of the beam that it continues.

    Args:
        drafter: The recurrent drafter.
        embedding: The target's embedding table.
        tokens: Last token of each beam, `[B, w]` int64.
        sources: Beam of the previous step that each beam continues, `[B, w]` int64.
        carried: Recurrent states after the previous step, `[B, w', D]`; None at the first step.
        start: Terms of the target's hidden state that all steps share, of each row `[B, 1, ...]`.
        window: Entries of the committed tokens, with a `length` that counts the drafts too; None to read none.

    Returns:
        Logits `[B, w, V']` and the new states `[B, w, D]`.
    """
    if carried is not None:
        # Beams are chosen again at each step, so each takes the state of the beam that it continues.
        carried = carried.gather(1, sources[:, :, None].expand(-1, -1, carried.shape[-1]))
    context = drafter.context
    read = None if window is None or context is None else partial(context, window=window)
    embedded = None if drafter.embedded is None else drafter.embedded[tokens]
    return drafter.step(embedding(tokens), carried, start, read, embedded)


def _remember(
    drafter: RecurrentDrafter, embedding: nn.Module, ids: Tensor, positions: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    assert drafter.context is not None
    return drafter.context.remember(drafter.fuse_hidden(hidden), embedding(ids), positions)


RecurrentDrafter.proposer_class = RecurrentProposer
