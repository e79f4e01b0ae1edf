"""The proposer that drafts with a DFlash, DFlash2 or DSpark drafter: a block of masks is filled in one pass.

All positions of the block are drafted at once, so a tree is searched in the scores of each position. A Markov head or a
selector makes the scores of a beam depend on its last token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from redrafter.cache.kv_cache import KVCache
from redrafter.drafting.context_attention import BACKENDS
from redrafter.drafting.decoder_parts import AttentionProducts, GatedMLP, of_beams
from redrafter.drafting.dflash_config import DFlashConfig
from redrafter.drafting.drafter_model import drafter_layer, layer_bytes
from redrafter.drafting.drafter_types import register_drafter
from redrafter.drafting.proposer import SearchProposer, State
from redrafter.drafting.text_drafters import ReadAt, ReplayableDrafter
from redrafter.errors import ArgumentError
from redrafter.model.forward_batch import DrafterLayer
from redrafter.model.target import Target
from redrafter.sampling.sampler import Sampler
from redrafter.tree.beam_search import Expand


class LayerContext(NamedTuple):
    """Entries of the text that one layer attends to, in B rows.

    Attributes:
        keys: Keys of S committed tokens, `[B, S, H, d]`.
        values: Their values, `[B, S, H, d]`.
        position: Their positions, `[B, S]` int64; missing ones are below 0, or not below the row's length.
    """

    keys: Tensor
    values: Tensor
    position: Tensor


class BlockContext(NamedTuple):
    """Holds the inputs of a block of B rows, in addition to its pending tokens.

    Attributes:
        length: Committed tokens of each row, `[B]` int64.
        read: Returns what the layer of a number attends to before the block.
    """

    length: Tensor
    read: Callable[[int], LayerContext]


class _Attention(AttentionProducts):
    """Attention of a block's positions to the committed tokens and to each other."""

    def __init__(self, config: DFlashConfig, layer: int):
        super().__init__(config.hidden_size, config, normed=True)
        self.window = config.sliding_window if layer in config.sliding_layers else None
        self.sees_later = config.sees_later(layer)

    def remember(self, hidden: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of tokens with hidden states `[..., D]` at positions `[...]`, `[..., H, d]` each."""
        return self.finish_key(self.by_head(self.k_proj(hidden)), position), self.by_head(self.v_proj(hidden))

    def forward(self, x: Tensor, position: Tensor, length: Tensor, context: LayerContext) -> Tensor:
        """Attend from blocks `[B, Q, D]` at positions `[B, Q]`, of rows with `length` `[B]` committed tokens."""
        query = self.finish_query(self.by_head(self.q_proj(x)), position)
        query = query.unflatten(2, (context.keys.shape[2], -1))  # [B, Q, H, g, d]
        key, value = (
            torch.cat(pair, dim=1).transpose(1, 2) for pair in zip(context[:2], self.remember(x, position), strict=True)
        )  # [B, H, S + Q, d]
        seen = (context.position >= 0) & (context.position < length[:, None])
        there = torch.cat([context.position, position], dim=1)[:, None]  # [B, 1, S + Q]
        seen = pad(seen, (0, x.shape[1]), value=True)[:, None].expand(-1, x.shape[1], -1)  # [B, Q, S + Q]
        if self.window is not None:
            seen = seen & (there > position[:, :, None] - self.window)
        if not self.sees_later:
            seen = seen & (there <= position[:, :, None])
        copies = query.shape[3]
        with sdpa_kernel(BACKENDS):
            read = scaled_dot_product_attention(
                # Queries of a key head are stacked along the tokens, so that keys are not copied for each of them.
                query.permute(0, 2, 3, 1, 4).flatten(2, 3),
                key,
                value,
                attn_mask=seen.repeat(1, copies, 1)[:, None],
            )  # [B, H, g Q, d]
        return self.o_proj(read.unflatten(2, (copies, -1)).permute(0, 3, 1, 2, 4).flatten(2))


class _Convolution(nn.Module):
    """The convolutions of DFlash2 before and after a sublayer, along a block: each position reads earlier ones.

    A tap's weight is a constant per channel plus a term computed from the sublayer's input for each group of channels.
    """

    def __init__(self, config: DFlashConfig):
        super().__init__()
        assert config.conv_kernel_size is not None
        assert config.conv_group_size is not None
        self.taps, self.group = config.conv_kernel_size, config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, self.taps, config.hidden_size))
        # The first tap alone: a new convolution is the identity.
        self.base_kernel.data[:, 0] = 1
        groups = config.hidden_size // self.group
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.taps * groups, bias=False)

    def around(self, sublayer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Apply a sublayer to `[B, Q, D]` between both convolutions."""
        kernels = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1)).repeat_interleave(self.group, dim=-1)
        before, after = (kernels + self.base_kernel).unbind(2)  # [B, Q, taps, D] each
        return self._convolve(sublayer(self._convolve(x, before)), after)

    def _convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        # Causal along the block, as each position reads those before it; shapes stay fixed.
        shifted = [pad(x, (0, 0, tap, 0))[:, : x.shape[1]] for tap in range(self.taps)]
        return (torch.stack(shifted, dim=2) * kernel).sum(dim=2)


class _Layer(nn.Module):
    """A decoder layer."""

    def __init__(self, config: DFlashConfig, layer: int):
        super().__init__()
        width, eps, convolved = config.hidden_size, config.rms_norm_eps, config.conv_kernel_size is not None
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.self_attn = _Attention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        self.mlp = GatedMLP(config)
        self.attention_conv = _Convolution(config) if convolved else None
        self.mlp_conv = _Convolution(config) if convolved else None

    def forward(self, x: Tensor, position: Tensor, length: Tensor, context: LayerContext) -> Tensor:
        """Apply the layer; takes the arguments of its attention."""
        attend = partial(self.self_attn, position=position, length=length, context=context)
        for norm, sublayer, convolution in (
            (self.input_layernorm, attend, self.attention_conv),
            (self.post_attention_layernorm, self.mlp, self.mlp_conv),
        ):
            y = norm(x)
            x = x + (sublayer(y) if convolution is None else convolution.around(sublayer, y))
        return x


class _MarkovHead(nn.Module):
    """DSpark's term of a position's logits that depends on the token before it, a product of rank r."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        assert config.markov_rank is not None
        rank, width = config.markov_rank, config.hidden_size
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        self.gate_proj = nn.Linear(width + rank, rank) if config.markov_type == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + width, 3 * rank) if config.markov_type == "rnn" else None

    def forward(self, tokens: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the term to add to logits, and the state that the next position reads.

        Args:
            tokens: The token before the position, of each beam, `[B, w]` int64.
            hidden: The hidden state of the position, `[B, D]`.
            state: The state returned for the position before, of the beam that each continues, `[B, w, r]`; None at
                first, and for a head without a recurrence.
        """
        before = self.markov_w1(tokens)  # [B, w, r]
        hidden = hidden[:, None].expand(-1, tokens.shape[1], -1)
        if self.gate_proj is not None:
            before = self.gate_proj(torch.cat([hidden, before], dim=-1)).sigmoid() * before
        if self.joint_proj is None:
            return self.markov_w2(before), None
        state = torch.zeros_like(before) if state is None else state
        gate, new, out = self.joint_proj(torch.cat([state, before, hidden], dim=-1)).chunk(3, dim=-1)
        gate = gate.sigmoid()
        return self.markov_w2(out.tanh()), gate * state + (1 - gate) * new.tanh()


class _Selector(nn.Module):
    """The selector of DFlash2, which scores the likeliest tokens of a position given the token before it."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        assert config.selector_rank is not None
        assert config.selector_top_k is not None
        self.top_k = min(config.selector_top_k, config.vocab_size)
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))

    def forward(self, tokens: Tensor, hidden: Tensor, logits: Tensor, scores: Tensor) -> Tensor:
        """Return logits of each beam's candidates, `[B, w, V]`: -inf for all other tokens.

        Args:
            tokens: The token before the position, of each beam, `[B, w]` int64.
            hidden: The hidden state of the position, `[B, D]`.
            logits: Its logits, `[B, 1, V]`.
            scores: The logits adjusted to the target's draw, by which candidates are chosen, `[B, 1, V]`.
        """
        # Chosen under the target's noise, as the drawn token may be unlikely by the logits alone.
        candidates = scores.topk(self.top_k, dim=-1).indices  # [B, 1, k]
        after = self.successor_codebook[candidates[:, 0]]  # [B, k, r]
        before = self.predecessor_codebook[tokens] * self.hidden_projection(hidden)[:, None]  # [B, w, r]
        chosen = logits.gather(2, candidates) + before @ after.transpose(1, 2)  # [B, w, k]
        empty = logits.new_full((*tokens.shape, logits.shape[-1]), -torch.inf)
        return empty.scatter(2, candidates.expand_as(chosen), chosen.to(logits.dtype))


@register_drafter("DFlash drafter", "redrafter_dflash")
class DFlashDrafter(ReplayableDrafter):
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
        self.layers = nn.ModuleList(_Layer(config, layer) for layer in range(config.num_layers))
        self.norm = nn.RMSNorm(width, eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.own_embedding else None
        ids = config.draft_vocab_size or config.vocab_size
        self.lm_head = nn.Linear(width, ids, bias=False) if config.own_head else None
        self.markov_head = _MarkovHead(config) if config.markov_rank else None
        self.candidate_selector = _Selector(config) if config.selector_rank else None
        self.post_init()

    @property
    def stack(self) -> Sequence["_Layer"]:
        """The layers, in order."""
        return list(self.layers)  # type: ignore[arg-type]

    @property
    def fingerprint_layer(self) -> nn.Module:
        """The product of the target's hidden states, whose norms identify the drafter: the head may be the target's."""
        return self.fc

    def stored_layer(self, target: Target, compiled: bool) -> DrafterLayer:
        """Return the layer that the drafter stores: keys and values of all its layers, as heads of one layer."""
        heads = self.config.num_layers * self.config.num_key_value_heads
        return drafter_layer(self, target, heads, self.config.head_dim, partial(_remember, self))

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

    def remember(self, hidden: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Compute keys and values of committed tokens, `[..., L H, d]` each: the heads of all layers in order.

        Args:
            hidden: Their hidden states as `fuse_hidden` returns them, `[..., D]`.
            position: Their positions, `[...]` int64.
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

    def forward(self, pending: Tensor, length: Tensor, read: Callable[[int], LayerContext], table: nn.Module) -> Tensor:
        """Fill a block of each row, and return the hidden states of all its positions, `[B, Q, D]`.

        Args:
            pending: The pending token of each row, `[B, 1]` int64.
            length: Committed tokens of each row, `[B]` int64.
            read: Returns what the layer of a number attends to before the block.
            table: The target's embedding table.
        """
        block = pad(pending, (0, self.config.block_size - 1), value=self.config.mask_token_id)  # [B, Q]
        x = (table if self.embed_tokens is None else self.embed_tokens)(block) * self.config.embedding_scale
        position = length[:, None] + torch.arange(block.shape[1], device=block.device)
        for number, layer in enumerate(self.stack):
            x = layer(x, position, length, read(number))
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
        """Return a function of a layer that reads the keys and values of the rows' committed tokens."""
        return BlockContext(state.length, partial(self.read_layer, cache, state.length))

    def scores(self, state: State, sampler: Sampler, noise: Tensor | None, context: BlockContext) -> Expand:
        """Return the function that scores the next tokens of every beam; see `SearchProposer.scores`."""
        drafter, markov, selector = self.drafter, self.drafter.markov_head, self.drafter.candidate_selector
        hidden = drafter(state.pending, *context, self.target.embedding)
        carried: Tensor | None = None  # [B, w, r], the state of a recurrent Markov head on each beam
        # The pending token's own position drafts nothing here, but starts the recurrence of the Markov head.
        if not drafter.config.sample_from_anchor:
            if markov is not None:
                _, carried = markov(state.pending, hidden[:, 0], None)
            hidden = hidden[:, 1:]
        logits = drafter.logits(hidden[:, : self.depth], self.target.head)  # [B, K, V']

        def expand(k: int, tokens: Tensor, sources: Tensor) -> Tensor:
            nonlocal carried
            here = logits[:, k, None]
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


def _remember(drafter: DFlashDrafter, ids: Tensor, positions: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    return drafter.remember(drafter.fuse_hidden(hidden), positions)
