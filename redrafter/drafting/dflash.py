"""The proposer that drafts with a DFlash, DFlash2 or DSpark drafter: a block of masks is filled in one pass.

All positions of the block are drafted at once, so a tree is searched in the scores of each position. A Markov head or a
selector makes the scores of a beam depend on its last token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from redrafter.cache.kv_cache import KVCache
from redrafter.drafting.decoder_parts import Sines, of_beams, rope_of
from redrafter.drafting.dflash_config import DFlashConfig
from redrafter.drafting.dflash_layers import (
    BlockLayer,
    BlockPlace,
    GivenContext,
    LayerContext,
    MarkovHead,
    PagedContext,
    ReadLayer,
    Selector,
)
from redrafter.drafting.drafter_model import compile_once, drafter_layer, for_any_tokens, layer_bytes
from redrafter.drafting.drafter_types import register_drafter
from redrafter.drafting.paged_entries import PagedEntries, reads_pages
from redrafter.drafting.proposer import SearchProposer, State
from redrafter.drafting.text_drafters import GivenTexts, ReadAt, TrainableDrafter
from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.model.forward_batch import DrafterLayer
from redrafter.model.layer_compiler import LayerCompiler
from redrafter.model.target import Target
from redrafter.model.varlen_forward import COMPILE_OPTIONS, CUTS
from redrafter.sampling.sampler import Sampler
from redrafter.tree.beam_search import Expand

# Positions of blocks that a training fills at once: enough for the products of a GPU. More would only take more memory,
# which holds all layers of one such part.
POSITIONS_AT_ONCE = 4096


class BlockContext(NamedTuple):
    """Holds the inputs of a block of B rows, in addition to its pending tokens.

    Attributes:
        length: Committed tokens of each row, `[B]` int64.
        layers: What each layer attends to before the block, in a paged cache; or a function that reads it.
    """

    length: Tensor
    layers: tuple[PagedEntries, ...] | ReadLayer


@register_drafter("DFlash drafter", "redrafter_dflash")
class DFlashDrafter(TrainableDrafter):
    """A drafter of blocks; it uses the target's embedding table and head, unless it has its own."""

    config_class = DFlashConfig
    config: DFlashConfig
    identity_fields = ("model_type", "hidden_size", "vocab_size", "num_layers", "block_size")

    def __init__(self, config: DFlashConfig):
        """Make a drafter with random weights; see `DrafterModel`."""
        super().__init__(config)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.target_layers) * width, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps)
        self.layers = nn.ModuleList(BlockLayer(config, layer) for layer in range(config.num_layers))
        self.norm = nn.RMSNorm(width, eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.own_embedding else None
        self.lm_head = nn.Linear(width, config.num_draft_ids, bias=False) if config.own_head else None
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.candidate_selector = Selector(config) if config.selector_rank else None
        self.post_init()

    @property
    def stack(self) -> Sequence["BlockLayer"]:
        """The layers, in order."""
        return list(self.layers)  # type: ignore[arg-type]

    @property
    def fingerprint_layer(self) -> nn.Module:
        """The product of the target's hidden states, whose norms identify the drafter: the head may be the target's."""
        return self.fc

    def stored_layer(self, target: Target, compiled: bool) -> DrafterLayer:
        """Return the layer that the drafter stores: keys and values of all its layers, as heads of one layer."""
        heads = self.config.num_layers * self.config.num_key_value_heads
        rope = rope_of(self.config, target.device)  # of which a compiled function cannot copy anything to the device
        compute = partial(_remember_compiled if compiled else _remember, self, rope)
        return drafter_layer(self, target, heads, self.config.head_dim, compute)

    def check_search(self, target: Target, depth: int) -> None:
        """Raise `ArgumentError` if a block drafts fewer tokens than `depth`."""
        if depth > self.config.drafts:
            raise ArgumentError(
                f"draft_len_per_beam={depth} is more than the {self.config.drafts} tokens that a block of this drafter "
                "holds"
            )

    def draft_bytes(self, depth: int) -> int:
        """Return the bytes of the weights that a draft of `depth` search steps reads, without the target's head."""
        unread = layer_bytes(self.fc)
        for table in (self.embed_tokens, None if self.markov_head is None else self.markov_head.markov_w1):
            unread += 0 if table is None else table.weight.nbytes
        # Only the Markov head is read at each level, all other weights once for the whole block.
        again = 0 if self.markov_head is None else layer_bytes(self.markov_head.markov_w2)
        return sum(weight.nbytes for weight in self.parameters()) - unread + (depth - 1) * again

    def target_head_reads(self, depth: int) -> int:
        """Return how often a draft reads the target's head: once for all its tokens, if the drafter has no head."""
        return 1 if self.lm_head is None else 0

    def fuse_hidden(self, hidden: Tensor) -> Tensor:
        """Fuse the outputs of the target's layers into the input of keys and values of committed tokens.

        Args:
            hidden: The target's last hidden state, which is ignored, followed by the outputs of the layers, `[..., F]`.

        Returns:
            `[..., D]`.
        """
        fused: Tensor = self.hidden_norm(self.fc(hidden[..., self.config.hidden_size :]))
        return fused

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
            def read_layer(layer: int) -> LayerContext:
                part = slice(layer * heads, (layer + 1) * heads)
                return LayerContext(keys[row, :, part], values[row, :, part], position.expand(len(row), -1))

            return BlockContext(length, read_layer)

        return at

    def context_bytes(self, length: int, beams: int) -> int:
        """Return the bytes of a layer's copies of a sequence's entries, and of a block's scores."""
        config = self.config
        stored = 4 * config.num_key_value_heads * config.head_dim * self.dtype.itemsize
        scores = 12 * config.block_size * config.num_attention_heads
        return length * (stored + scores) + 4 * config.drafts * config.vocab_size

    def check_unroll(self, steps: int) -> None:
        """Raise an error for more steps than a block drafts, or a bound of the logits; see `TrainableDrafter`."""
        if steps > self.config.drafts:
            raise ArgumentError(
                f"--draft-len {steps} is more than the {self.config.drafts} tokens that a block of this drafter holds"
            )
        if self.config.logit_softcap is not None:
            raise UnsupportedError(
                f"a block drafter with logit_softcap={self.config.logit_softcap} cannot be trained: the loss has no "
                "such bound; train a new one with --form dflash"
            )

    def unroll(self, texts: GivenTexts) -> Tensor:
        """Fill a block at each anchor, as the search does; see `TrainableDrafter.unroll`.

        Blocks attend to the committed tokens before their anchor and to themselves. They are filled in parts, and
        filled again for the gradients on a GPU, so that of all of them only the hidden states are kept.

        Returns:
            The hidden states of the positions that draft, `[A, K, D]`, followed by the inputs of the Markov head's and
            the selector's product.
        """
        tokens, (rows, length) = texts.tokens, texts.tokens.shape
        index, device = torch.arange(length, device=tokens.device), tokens.device
        sines = Sines.at(index, *rope_of(self.config, device))
        keys, values = self.remember(self.fuse_hidden(texts.features), sines)  # [B, T, L H, d]
        # Blocks are filled at the same columns of all rows. Finding those with an anchor would make the host wait for a
        # GPU, where most columns have one.
        every = tokens.is_cuda or not len(texts.anchors)
        columns = index if every else (texts.anchors % length).unique()  # [P]
        filled = []
        for part in columns.split(max(POSITIONS_AT_ONCE // (rows * self.config.block_size), 1)):
            arguments = texts, keys, values, part
            if tokens.is_cuda:
                filled.append(checkpoint(self._fill_columns, *arguments, use_reentrant=False))
            else:
                filled.append(self._fill_columns(*arguments))
        place = texts.anchors // length * len(columns) + torch.searchsorted(columns, texts.anchors % length)
        hidden = torch.cat(filled, dim=1).flatten(0, 1).index_select(0, place)  # [A, Q, D]
        before, state = tokens.flatten()[texts.position], None  # [A, K], the token before each draft
        first = 0 if self.config.sample_from_anchor else 1
        drafted = hidden[:, first:][:, : before.shape[1]]  # [A, K, D]
        parts = [drafted * self.config.logit_scale]
        if (markov := self.markov_head) is not None:
            if first:
                _, state = markov.advance(before[:, :1], hidden[:, 0], None)
            inputs = []
            for k in range(before.shape[1]):
                x, state = markov.advance(before[:, k, None], drafted[:, k], state)
                inputs.append(x)
            parts.append(torch.cat(inputs, dim=1))
        if self.candidate_selector is not None:
            parts.append(self.candidate_selector.join(before, drafted))
        return torch.cat(parts, dim=-1)

    def _fill_columns(self, texts: GivenTexts, keys: Tensor, values: Tensor, columns: Tensor) -> Tensor:
        """Fill blocks whose anchors are at columns `[c]` int64 of each text, and return their states, `[B, c, Q, D]`.

        Args:
            texts: The texts.
            keys: Keys of their tokens in all layers, `[B, T, L H, d]`.
            values: Values likewise.
            columns: Columns of the anchors.
        """
        assert texts.table is not None
        (rows, length), segment, heads = texts.tokens.shape, texts.segment, self.config.num_key_value_heads
        committed = (torch.arange(length, device=columns.device) <= columns[:, None]).expand(rows, -1, -1)  # [B, c, T]
        if segment is not None:
            committed = committed & (segment[:, columns, None] == segment[:, None])
        pending = texts.tokens[:, (columns + 1).clamp(max=length - 1)]  # [B, c]

        def read_layer(layer: int) -> GivenContext:
            part = slice(layer * heads, (layer + 1) * heads)
            return GivenContext(keys[:, :, part], values[:, :, part], committed)

        hidden: Tensor = self(pending.flatten()[:, None], (columns + 1).repeat(rows), read_layer, texts.table)
        return hidden.unflatten(0, (rows, -1))

    def trained_heads(self, x: Tensor) -> list[tuple[Tensor | None, ...]]:
        """Return the head with the terms of the Markov head and of the selector; see `TrainableDrafter.trained_heads`.

        The candidates of a selector are chosen without its term, so the logits without it are a second head.
        """
        width, rank = self.config.hidden_size, self.config.markov_rank or 0
        head: tuple[Tensor | None, ...] = x[..., :width], None if self.lm_head is None else self.lm_head.weight
        if self.markov_head is not None:
            head += (x[..., width : width + rank], self.markov_head.markov_w2.weight)
        if self.candidate_selector is None:
            return [head]
        return [(*head, x[..., width + rank :], self.candidate_selector.successor_codebook), head]

    def unroll_bytes(self, rows: int, length: int, steps: int) -> dict[str, float]:
        """Return about how many bytes `unroll` keeps on a GPU; see `TrainableDrafter.unroll_bytes`."""
        config, layers, count = self.config, self.config.num_layers, self.config.block_size
        attended = config.num_attention_heads * config.head_dim
        stored = 2 * layers * config.num_key_value_heads * config.head_dim  # keys and values of a token
        kept = 4 * (2 * stored + (count + 3 * steps) * config.hidden_size)
        together = min(max(POSITIONS_AT_ONCE, rows * count), rows * length * count)
        layer = 4 * (10 * config.hidden_size + 4 * config.intermediate_size + 4 * attended)
        # Of each layer: a mask as booleans and as numbers, and keys and values by query head.
        seen = length + together // rows
        masks = layers * seen * (5 * together + 8 * rows * attended)
        return {
            "the drafter's states": rows * length * kept + together * layers * layer,
            "its attention to the texts": masks,
        }

    def forward(
        self,
        pending: Tensor,
        length: Tensor,
        read: ReadLayer,
        table: nn.Module,
        rope: tuple[Tensor, float] | None = None,
    ) -> Tensor:
        """Fill a block of each row, and return the hidden states of all its positions, `[B, Q, D]`.

        Args:
            pending: The pending token of each row, `[B, 1]` int64.
            length: Committed tokens of each row, `[B]` int64.
            read: Returns what the layer of a number attends to before the block.
            table: The target's embedding table.
            rope: What `rope_of` returns, which a compiled caller looks up before; None to look it up here.
        """
        block = pad(pending, (0, self.config.block_size - 1), value=self.config.mask_token_id)  # [B, Q]
        # The target's table is frozen, and a training has float32 drafters for targets of any dtype.
        x = table(block).detach().to(self.norm.weight.dtype) if self.embed_tokens is None else self.embed_tokens(block)
        x = x * self.config.embedding_scale
        position = length[:, None] + torch.arange(block.shape[1], device=block.device)
        place = BlockPlace(position, Sines.at(position, *(rope or rope_of(self.config, length.device))))
        for number, layer in enumerate(self.stack):
            x = layer(x, place, read(number))
        hidden: Tensor = self.norm(x)
        return hidden

    def logits(self, hidden: Tensor, head: nn.Module) -> Tensor:
        """Return the logits of positions `[..., D]`, over the drafter's vocabulary; `head` is the target's."""
        config = self.config
        logits: Tensor = (head if self.lm_head is None else self.lm_head)(hidden) * config.logit_scale
        cap = config.logit_softcap
        return logits if cap is None else (logits / cap).tanh() * cap


@dataclass(frozen=True)
class DFlashProposer(SearchProposer):
    """Drafts with a block drafter; has the attributes of `SearchProposer`."""

    drafter: DFlashDrafter

    def read_context(self, state: State, cache: KVCache) -> BlockContext:
        """Return the keys and values of the rows' committed tokens where they are, or a function that copies them."""
        if reads_pages(cache):
            whole = PagedEntries.from_cache(cache, state.length, first=0, sees_later=True)
            heads = self.drafter.config.num_key_value_heads
            sides = zip(*(x.split(heads, dim=2) for x in (whole.keys, whole.values)), strict=True)
            return BlockContext(state.length, tuple(whole._replace(keys=k, values=v) for k, v in sides))
        return BlockContext(state.length, partial(self.read_layer, cache, state.length))

    def scores(self, state: State, sampler: Sampler, noise: Tensor | None, context: BlockContext) -> Expand:
        """Return the function that scores the next tokens of every beam; see `SearchProposer.scores`."""
        drafter, markov, selector = self.drafter, self.drafter.markov_head, self.drafter.candidate_selector
        fill = _fill_compiled if self.compiled else _fill
        hidden = fill(drafter, self.target.embedding, state.pending, context)
        carried: Tensor | None = None  # [B, w, r], the state of a recurrent Markov head on each beam
        # The pending token's own position drafts nothing here, but starts the recurrence of the Markov head.
        if not drafter.config.sample_from_anchor:
            if markov is not None:
                _, carried = markov(state.pending, hidden[:, 0], None)
            hidden = hidden[:, 1:]
        # By position first, so that those of one position are read where they are.
        logits = drafter.logits(hidden[:, : self.depth].transpose(0, 1), self.target.head)  # [K, B, V']

        def expand(k: int, tokens: Tensor, sources: Tensor) -> Tensor:
            nonlocal carried
            here = logits[k, :, None]
            if markov is not None:
                carried = None if carried is None else of_beams(carried, sources)
                added, carried = markov(tokens, hidden[:, k], carried)
                here = here + added
            scores = sampler.draft_scores(here, noise, k, drafter.draft_ids)
            if selector is not None:
                scores = sampler.draft_scores(selector(tokens, hidden[:, k], here, scores), noise, k, None)
            return scores.expand(-1, tokens.shape[1], -1)

        return expand

    def read_layer(self, cache: KVCache, length: Tensor, layer: int) -> LayerContext:
        """Return the entries that a layer attends to, of rows with `length` `[B]` int64 committed tokens."""
        window, heads = self.drafter.stack[layer].self_attn.window, self.drafter.config.num_key_value_heads
        size = cache.window if window is None else min(window, cache.window)
        position = torch.arange(size, device=length.device).expand(len(length), -1)
        if size < cache.window:
            position = position + (length - size)[:, None]
        part = slice(layer * heads, (layer + 1) * heads)
        return LayerContext(*cache.read_drafter_layer(position.clamp(min=0), part), position)


DFlashDrafter.proposer_class = DFlashProposer


def _fill(drafter: DFlashDrafter, table: nn.Module, pending: Tensor, context: BlockContext) -> Tensor:
    """Fill a block of each row, as `DFlashDrafter.forward` does."""
    length, layers = context
    if callable(layers):
        return drafter(pending, length, layers, table)
    return _fill_paged(drafter, table, pending, length, layers, rope_of(drafter.config, length.device))


def _fill_paged(
    drafter: DFlashDrafter,
    table: nn.Module,
    pending: Tensor,
    length: Tensor,
    layers: tuple[PagedEntries, ...],
    rope: tuple[Tensor, float],
) -> Tensor:
    """Fill a block of each row, whose layers attend to entries in a paged cache."""
    size = drafter.config.block_size
    seen = torch.ones(size, size, dtype=torch.bool, device=length.device)
    depth = torch.arange(size, device=length.device).expand(len(length), -1)
    sees_later = [layer.self_attn.sees_later for layer in drafter.stack]
    by_direction = {
        later: layers[0].rows((seen if later else seen.tril()).expand(len(length), -1, -1), depth)
        for later in (False, True)
        if later in sees_later
    }

    def read_entries(number: int) -> PagedContext:
        return PagedContext(layers[number], by_direction[sees_later[number]])

    hidden: Tensor = drafter(pending, length, read_entries, table, rope)
    return hidden


@cache
def _compiled_fill() -> Callable[..., Tensor]:
    """Return `_fill_paged` compiled, once for all proposers, and layers that are alike once for all of these."""
    from torch._inductor.compile_fx import compile_fx  # takes seconds to import

    inductor: Any = partial(compile_fx, config_patches=COMPILE_OPTIONS)
    return torch.compile(_fill_paged, fullgraph=True, backend=LayerCompiler(CUTS, inductor))


def _fill_compiled(drafter: DFlashDrafter, table: nn.Module, pending: Tensor, context: BlockContext) -> Tensor:
    """Fill a block of each row as `_fill` does, compiled for any number of rows where entries are in a paged cache."""
    length, layers = context
    if callable(layers):
        return _fill(drafter, table, pending, context)
    for x in (pending, length, layers[0].length, layers[0].table):
        torch._dynamo.maybe_mark_dynamic(x, 0)
    return _compiled_fill()(drafter, table, pending, length, layers, rope_of(drafter.config, length.device))


def _remember(
    drafter: DFlashDrafter, rope: tuple[Tensor, float], ids: Tensor, positions: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    return drafter.remember(drafter.fuse_hidden(hidden), Sines.at(positions, *rope))


def _remember_compiled(
    drafter: DFlashDrafter, rope: tuple[Tensor, float], ids: Tensor, positions: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `_remember`, compiled for any number of tokens."""
    made: tuple[Tensor, Tensor] = compile_once(_remember)(drafter, rope, *for_any_tokens(ids, positions, hidden))
    return made
