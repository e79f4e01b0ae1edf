"""The layers of a drafter of blocks, which attend to entries in a paged cache or to copies of them, and its heads."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from redrafter.drafting.anchor_attention import attend_ranges
from redrafter.drafting.context_attention import BACKENDS
from redrafter.drafting.decoder_parts import AttentionProducts, GatedMLP, RMSNorm, Sines
from redrafter.drafting.dflash_config import DFlashConfig
from redrafter.drafting.paged_entries import PagedEntries
from redrafter.kernels.attention_inputs import TokenRows

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class LayerContext(NamedTuple):
    """Entries of the text that one layer attends to, in B rows.

    Attributes:
        keys: Keys of S committed tokens, `[B, S, H, d]`.
        values: Their values, `[B, S, H, d]`.
        position: Their positions, `[B, S]` int64; those that a row does not have are below 0, or not below its length.
    """

    keys: Tensor
    values: Tensor
    position: Tensor


class GivenContext(NamedTuple):
    """Entries of whole sequences, which blocks at c positions of each attend to at once.

    Attributes:
        keys: Keys of the T tokens of B sequences, `[B, T, H, d]`.
        values: Their values, `[B, T, H, d]`.
        committed: Which tokens are committed before each block, `[B, c, T]` bool.
    """

    keys: Tensor
    values: Tensor
    committed: Tensor


class FusedContext(NamedTuple):
    """Entries of whole sequences, which blocks at c positions of each attend to at once in one kernel.

    Attributes:
        keys: Keys of the T tokens of B sequences, `[B, T, H, d]`.
        values: Their values, `[B, T, H, d]`.
        mask: The tokens and positions of blocks that each position sees, from `SeenRanges`.
    """

    keys: Tensor
    values: Tensor
    mask: "BlockMask"


class PagedContext(NamedTuple):
    """Entries that one layer attends to in a paged cache, those of the block included.

    Attributes:
        entries: Keys and values of the committed tokens, and room for those of the block.
        rows: The positions of the block as new nodes, which see each other as the layer says.
    """

    entries: PagedEntries
    rows: TokenRows


AnyContext: TypeAlias = LayerContext | GivenContext | FusedContext | PagedContext
ReadLayer: TypeAlias = Callable[[int], AnyContext]
"""Returns what the layer of a number attends to before the block."""


class BlockAttention(AttentionProducts):
    """Attention of a block's positions to the committed tokens and to each other."""

    def __init__(self, config: DFlashConfig, layer: int):
        super().__init__(config.hidden_size, config, normed=True)
        self.window = config.sliding_window if layer in config.sliding_layers else None
        self.sees_later = config.sees_later(layer)

    def remember(self, hidden: Tensor, position: Tensor | Sines) -> tuple[Tensor, Tensor]:
        """Return keys and values of tokens with hidden states `[..., D]` at positions `[...]`, `[..., H, d]` each."""
        return self.finish_key(self.by_head(self.k_proj(hidden)), position), self.by_head(self.v_proj(hidden))

    def forward(self, x: Tensor, place: "BlockPlace", context: AnyContext) -> Tensor:
        """Attend from blocks `[B, Q, D]` at a place to what is before them, and to the blocks themselves."""
        query = self.finish_query(self.by_head(self.q_proj(x)), place.sines)  # [B, Q, h, d]
        new = self.remember(x, place.sines)
        if isinstance(context, PagedContext):
            attended = context.entries.attend(query, *new, context.rows, window=self.window or 0)
            return self.o_proj(attended.flatten(2))
        if isinstance(context, GivenContext):
            return self.o_proj(self._attend_together(query, new, place, context))
        if isinstance(context, FusedContext):
            rows = context.keys.shape[0]
            by_row = (rearrange(part, "(b c) q h d -> b (c q) h d", b=rows) for part in (query, *new))
            queries, keys, values = by_row
            keys, values = (torch.cat(pair, dim=1) for pair in zip(context[:2], (keys, values), strict=True))
            attended = attend_ranges(queries, keys, values, context.mask)
            return self.o_proj(rearrange(attended, "b (c q) h d -> (b c) q (h d)", q=x.shape[1]))
        return self.o_proj(self._attend_densely(query, new, place, context))

    def _attend_densely(
        self, query: Tensor, new: tuple[Tensor, Tensor], place: "BlockPlace", context: LayerContext
    ) -> Tensor:
        """Attend over copies of the committed tokens' entries, and return the attended values, `[B, Q, h d]`."""
        position, count = place.position, query.shape[1]
        query = query.unflatten(2, (context.keys.shape[2], -1))  # [B, Q, H, g, d]
        key, value = (
            torch.cat(pair, dim=1).transpose(1, 2) for pair in zip(context[:2], new, strict=True)
        )  # [B, H, S + Q, d]
        seen = (context.position >= 0) & (context.position < position[:, :1])
        there = torch.cat([context.position, position], dim=1)[:, None]  # [B, 1, S + Q]
        seen = pad(seen, (0, count), value=True)[:, None].expand(-1, count, -1)  # [B, Q, S + Q]
        if self.window is not None:
            seen = seen & (there > position[:, :, None] - self.window)
        if not self.sees_later:
            seen = seen & (there <= position[:, :, None])
        copies = query.shape[3]
        with sdpa_kernel(BACKENDS):
            read = scaled_dot_product_attention(
                query.permute(0, 2, 3, 1, 4).flatten(2, 3), key, value, attn_mask=seen.repeat(1, copies, 1)[:, None]
            )  # [B, H, g Q, d]
        return read.unflatten(2, (copies, -1)).permute(0, 3, 1, 2, 4).flatten(2)

    def _attend_together(
        self, query: Tensor, new: tuple[Tensor, Tensor], place: "BlockPlace", context: GivenContext
    ) -> Tensor:
        """Attend from c blocks of each sequence, as B c rows, and return the attended values, `[B c, Q, h d]`.

        The blocks of a sequence share the products with its entries, which are not copied for each of them.
        """
        (rows, blocks, length), count = context.committed.shape, query.shape[1]
        query = rearrange(query, "(b c) q (h g) d -> b h c (q g) d", b=rows, h=new[0].shape[2])
        own_key, own_value = (rearrange(x, "(b c) q h d -> b h c q d", b=rows) for x in new)
        key, value = (rearrange(x, "b t h d -> b h t d") for x in context[:2])
        copies, scaled = query.shape[3] // count, query * query.shape[-1] ** -0.5
        scores = torch.cat(
            [torch.unflatten(scaled.flatten(2, 3) @ key.mT, 2, (blocks, -1)), scaled @ own_key.mT], dim=-1
        )  # [B, H, c, Q g, T + Q]
        index, step = torch.arange(length, device=query.device), torch.arange(count, device=query.device)
        seen = context.committed[:, :, None].expand(-1, -1, count, -1)  # [B, c, Q, T]
        own = torch.ones(count, count, dtype=torch.bool, device=query.device)
        if self.window is not None:
            seen = seen & (index > place.position.view(rows, blocks, count, 1) - self.window)
            own = own & (step > step[:, None] - self.window)
        if not self.sees_later:
            own = own.tril()
        hidden = ~torch.cat([seen, own.expand(rows, blocks, -1, -1)], dim=-1).repeat_interleave(copies, dim=2)
        weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(dim=-1).to(value.dtype)
        of_text, of_own = weights.split([length, count], dim=-1)
        read = torch.unflatten(of_text.flatten(2, 3) @ value, 2, (blocks, -1)) + of_own @ own_value
        return rearrange(read, "b h c (q g) d -> (b c) q (h g d)", g=copies)


class BlockPlace(NamedTuple):
    """The positions of a block in each row.

    Attributes:
        position: `[B, Q]` int64, the first of which is the number of committed tokens.
        sines: Those of the positions.
    """

    position: Tensor
    sines: Sines


class Convolution(nn.Module):
    """The convolutions of DFlash2 before and after a sublayer, along a block: each position reads those before it.

    A tap's weight is a constant of each channel plus a term computed from the sublayer's input for each group of them.
    """

    def __init__(self, config: DFlashConfig):
        super().__init__()
        assert config.conv_kernel_size is not None
        assert config.conv_group_size is not None
        self.taps, self.group = config.conv_kernel_size, config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, self.taps, config.hidden_size))
        self.base_kernel.data[:, 0] = 1
        groups = config.hidden_size // self.group
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.taps * groups, bias=False)

    def around(self, sublayer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Apply a sublayer to `[B, Q, D]` between both convolutions."""
        kernels = torch.unflatten(self.kernel_projection(x), -1, (2, self.taps, -1)).repeat_interleave(
            self.group, dim=-1
        )
        before, after = (kernels + self.base_kernel).unbind(2)  # [B, Q, taps, D] each
        return self._convolve(sublayer(self._convolve(x, before)), after)

    def _convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        # Causal along the block, as each position reads those before it; shapes stay fixed.
        shifted = [pad(x, (0, 0, tap, 0))[:, : x.shape[1]] for tap in range(self.taps)]
        return (torch.stack(shifted, dim=2) * kernel).sum(dim=2)


class BlockLayer(nn.Module):
    """A decoder layer."""

    def __init__(self, config: DFlashConfig, layer: int):
        super().__init__()
        width, eps, convolved = config.hidden_size, config.rms_norm_eps, config.conv_kernel_size is not None
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = BlockAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = GatedMLP(config)
        self.attention_conv = Convolution(config) if convolved else None
        self.mlp_conv = Convolution(config) if convolved else None

    def forward(self, x: Tensor, place: BlockPlace, context: AnyContext) -> Tensor:
        """Apply the layer; the arguments are those of its attention."""
        attend = partial(self.self_attn, place=place, context=context)
        for norm, sublayer, convolution in (
            (self.input_layernorm, attend, self.attention_conv),
            (self.post_attention_layernorm, self.mlp, self.mlp_conv),
        ):
            y = norm(x)
            x = x + (sublayer(y) if convolution is None else convolution.around(sublayer, y))
        return x


class MarkovHead(nn.Module):
    """DSpark's term of a position's logits for the token before it, a product of rank r."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        assert config.markov_rank is not None
        rank, width = config.markov_rank, config.hidden_size
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.num_draft_ids, bias=False)
        self.gate_proj = nn.Linear(width + rank, rank) if config.markov_type == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + width, 3 * rank) if config.markov_type == "rnn" else None

    def forward(self, tokens: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the term to add to logits, `[B, w, V']`, and the state that the next position reads.

        The arguments are those of `advance`.
        """
        x, state = self.advance(tokens, hidden, state)
        return self.markov_w2(x), state

    def advance(self, tokens: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the input of the product over the ids, `[B, w, r]`, and the state that the next position reads.

        Args:
            tokens: The token before the position, of each beam, `[B, w]` int64.
            hidden: The hidden state of the position, `[B, D]`.
            state: What the position before returned, of the beam that each continues, `[B, w, r]`; None at first, and
                for a head without a recurrence.
        """
        before = self.markov_w1(tokens)  # [B, w, r]
        hidden = hidden[:, None].expand(-1, tokens.shape[1], -1)
        if self.gate_proj is not None:
            before = self.gate_proj(torch.cat([hidden, before], dim=-1)).sigmoid() * before
        if self.joint_proj is None:
            return before, None
        state = torch.zeros_like(before) if state is None else state
        gate, new, out = self.joint_proj(torch.cat([state, before, hidden], dim=-1)).chunk(3, dim=-1)
        gate = gate.sigmoid()
        return out.tanh(), gate * state + (1 - gate) * new.tanh()


class Selector(nn.Module):
    """The selector of DFlash2, which scores the likeliest tokens of a position for the token before it."""

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
            scores: The same as the target will draw, by which candidates are chosen, `[B, 1, V]`.
        """
        candidates = scores.topk(self.top_k, dim=-1).indices  # [B, 1, k]
        after = self.successor_codebook[candidates[:, 0]]  # [B, k, r]
        before = self.join(tokens, hidden[:, None])  # [B, w, r]
        chosen = logits.gather(2, candidates) + before @ after.transpose(1, 2)  # [B, w, k]
        empty = logits.new_full((*tokens.shape, logits.shape[-1]), -torch.inf)
        return empty.scatter(2, candidates.expand_as(chosen), chosen.to(logits.dtype))

    def join(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return what is multiplied with the codes of candidates, `[..., r]`.

        Args:
            tokens: The token before the position, `[...]` int64.
            hidden: The hidden state of the position, which broadcasts to `[..., D]`.
        """
        return self.predecessor_codebook[tokens] * self.hidden_projection(hidden)
