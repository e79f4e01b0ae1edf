"""The layers of a drafter of blocks, which attend to entries in a paged cache or to copies of them, and its heads."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from redrafter.drafting.context_attention import BACKENDS
from redrafter.drafting.decoder_parts import AttentionProducts, GatedMLP, RMSNorm, Sines
from redrafter.drafting.dflash_config import DFlashConfig
from redrafter.drafting.paged_entries import PagedEntries
from redrafter.kernels.attention_inputs import TokenRows


class CopiedContext(NamedTuple):
    """Copies of the entries that one layer attends to in B rows, each of which has c blocks.

    Attributes:
        keys: Keys of S entries, `[B, S, H, d]`.
        values: Their values, `[B, S, H, d]`.
        seen: Which of them, and then of the c Q positions of the row's blocks, each of these positions attends to,
            `[B, c Q, S + c Q]` bool, from `seen_by_blocks`.
    """

    keys: Tensor
    values: Tensor
    seen: Tensor


class PagedContext(NamedTuple):
    """Entries that one layer attends to in a paged cache, those of the block included.

    Attributes:
        entries: Keys and values of the committed tokens, and room for those of the block.
        rows: The positions of the block as new nodes, which see each other as the layer says.
    """

    entries: PagedEntries
    rows: TokenRows


ReadLayer: TypeAlias = Callable[[int, Tensor], CopiedContext | PagedContext]
"""Returns what the layer of a number attends to, given the positions of blocks, `[B c, Q]` int64."""


def seen_by_blocks(committed: Tensor, there: Tensor, position: Tensor, window: int | None, sees_later: bool) -> Tensor:
    """Return which entries the positions of blocks attend to, `CopiedContext.seen`.

    Args:
        committed: Which of the S entries of a row are committed before each of its c blocks, `[B, c, S]` bool.
        there: Positions of these entries, `[B, S]` int64.
        position: Positions of the blocks, `[B, c, Q]` int64.
        window: Positions that each position sees, its own included; None for all.
        sees_later: Whether positions see later ones of their block.
    """
    (rows, blocks, size), device = position.shape, position.device
    text = committed[:, :, None].expand(-1, -1, size, -1)  # [B, c, Q, S]
    own = torch.ones(size, size, dtype=torch.bool, device=device)
    if window is not None:
        text = text & (there[:, None, None] > position[..., None] - window)
        own = own.triu(1 - window)
    if not sees_later:
        own = own.tril()
    same = torch.eye(blocks, dtype=torch.bool, device=device)[:, None, :, None]
    own = (same & own[:, None]).reshape(blocks * size, -1)  # no block sees another
    return torch.cat([text.flatten(1, 2), own.expand(rows, -1, -1)], dim=2)


class BlockAttention(AttentionProducts):
    """Attention of a block's positions to the committed tokens and to each other."""

    def __init__(self, config: DFlashConfig, layer: int):
        super().__init__(config.hidden_size, config, normed=True)
        self.window = config.sliding_window if layer in config.sliding_layers else None
        self.sees_later = config.sees_later(layer)

    def remember(self, hidden: Tensor, position: Tensor | Sines) -> tuple[Tensor, Tensor]:
        """Return keys and values of tokens with hidden states `[..., D]` at positions `[...]`, `[..., H, d]` each."""
        return self.finish_key(self.by_head(self.k_proj(hidden)), position), self.by_head(self.v_proj(hidden))

    def forward(self, x: Tensor, sines: Sines, context: CopiedContext | PagedContext) -> Tensor:
        """Attend from blocks `[B c, Q, D]`, whose positions have these sines, to a context and to the blocks."""
        query = self.finish_query(self.by_head(self.q_proj(x)), sines)  # [B c, Q, h, d]
        new = self.remember(x, sines)
        if isinstance(context, PagedContext):
            attended = context.entries.attend(query, *new, context.rows, window=self.window or 0)
            return self.o_proj(attended.flatten(2))
        rows, heads = len(context.keys), new[0].shape[2]
        own = (rearrange(part, "(b c) q h d -> b (c q) h d", b=rows) for part in new)
        key, value = (rearrange(torch.cat(x, 1), "b s h d -> b h s d") for x in zip(context[:2], own, strict=True))
        query = rearrange(query, "(b c) q (h g) d -> b h (g c q) d", b=rows, h=heads)
        seen = context.seen.repeat(1, query.shape[2] // context.seen.shape[1], 1)[:, None]
        with sdpa_kernel(BACKENDS):
            read = scaled_dot_product_attention(query.to(value.dtype), key.to(value.dtype), value, attn_mask=seen)
        blocks, size = len(x) // rows, x.shape[1]
        return self.o_proj(rearrange(read, "b h (g c q) d -> (b c) q (h g d)", c=blocks, q=size))


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
        kernels = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1)).repeat_interleave(self.group, dim=-1)
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

    def forward(self, x: Tensor, sines: Sines, context: CopiedContext | PagedContext) -> Tensor:
        """Apply the layer; the arguments are those of its attention."""
        attend = partial(self.self_attn, sines=sines, context=context)
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
        """Return the vectors that are multiplied with the codes of candidates, `[..., r]`.

        Args:
            tokens: The token before the position, `[...]` int64.
            hidden: The hidden state of the position, which broadcasts to `[..., D]`.
        """
        return self.predecessor_codebook[tokens] * self.hidden_projection(hidden)
