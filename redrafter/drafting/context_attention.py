"""Attention of a recurrent drafter to the committed tokens.

Each pair of neighbouring tokens has a key, computed from its first token, and a value, computed from its second one. So
where a drafted token occurred before, the draft can read which token followed it. As in a decoder layer, the key and
value of a token depend only on its hidden state and embedding. They are computed once, and cached with the target's
own.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from redrafter.drafting.decoder_parts import Sines, normalise, rotate
from redrafter.drafting.drafter_config import DrafterConfig

ROPE_THETA = 10_000.0
EMPTY_ENTRY = (0, 0, 0, 0, 1, 0)  # pads keys or values `[B, S, H, d]` with an entry of zeros before them
# All backends with masks except cuDNN, which was not measured.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class ContextWindow(NamedTuple):
    """The keys and values that the drafts of B rows attend to: the last S pairs of neighbouring tokens of each row.

    The first entry is empty, so that a draft can attend to no token.

    Attributes:
        keys: The empty entry, then the key of the first token of each pair, `[B, H, d, 1 + S]`.
        values: The empty entry, then the value of the second token of each pair, `[B, H, 1 + S, d]`.
        bias: Added to scores, `[B, 1, 1, 1 + S]` float32: -inf for the missing pairs of a short sequence, else 0.
        length: Committed tokens of each row, `[B]` int64.
    """

    keys: Tensor
    values: Tensor
    bias: Tensor
    length: Tensor

    @classmethod
    def read_last(cls, length: Tensor, size: int, read: Callable[[Tensor], tuple[Tensor, Tensor]]) -> "ContextWindow":
        """Return the last `size` pairs of rows with `length` `[B]` committed tokens.

        Args:
            length: Committed tokens of each row, `[B]` int64.
            size: S, pairs that are read.
            read: Returns the keys and the values of the tokens at positions `[B, S + 1]`, `[B, S + 1, H, d]`.
        """
        position = (length[:, None] - 1 - size) + torch.arange(size + 1, device=length.device)  # [B, S + 1]
        keys, values = read(position.clamp(min=0))
        missing = pad(position[:, :-1] < 0, (1, 0))  # [B, 1 + S]
        return cls(
            rearrange(pad(keys[:, :-1], EMPTY_ENTRY), "b s h d -> b h d s"),
            rearrange(pad(values[:, 1:], EMPTY_ENTRY), "b s h d -> b h s d"),
            torch.zeros_like(missing, dtype=torch.float32).masked_fill(missing, -torch.inf)[:, None, None],
            length,
        )


class ContextAttention(nn.Module):
    """Attention with grouped heads, rotary positions, RMS-normalised queries and keys, and an empty entry.

    Args:
        config: The architecture of the drafter.
    """

    def __init__(self, config: DrafterConfig):
        super().__init__()
        width, self.size, self.eps = config.hidden_size, config.context_head_dim, config.rms_norm_eps
        self.query = nn.Linear(width, config.context_heads * self.size, bias=False)
        self.key = nn.Linear(2 * width, config.context_kv_heads * self.size, bias=False)
        self.value = nn.Linear(2 * width, config.context_kv_heads * self.size, bias=False)
        self.scale = nn.Parameter(torch.ones(self.size))
        self.out = nn.Linear(config.context_heads * self.size, width, bias=False)

    def remember(self, hidden: Tensor, embedding: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the key and the value of tokens, `[..., H, d]` each.

        Args:
            hidden: Hidden states of the tokens as `RecurrentDrafter.fuse_hidden` returns them, `[..., D]`.
            embedding: The target's embeddings of the tokens, `[..., D]`.
            position: Their positions, `[...]` int64.
        """
        joined = torch.cat([normalise(hidden, self.eps), normalise(embedding, self.eps)], dim=-1)  # [..., 2D]
        key, value = (torch.unflatten(x, -1, (-1, self.size)) for x in (self.key(joined), self.value(joined)))
        return _rotate(normalise(key, self.eps), position), value

    def forward(self, state: Tensor, window: ContextWindow) -> Tensor:
        """Attend from recurrent states to the committed tokens, and return the attended values, `[B, w, D]`.

        Args:
            state: The states of w beams in each row, `[B, w, D]`.
            window: The keys and values that the states attend to, with a `length` that counts the drafts before them.
        """
        query = self._queries(state, window.length[:, None])  # [B, w, h, d]
        query = rearrange(query, "b w (h g) d -> b h (w g) d", h=window.keys.shape[1])
        scores = (query * self.size**-0.5) @ window.keys.to(query.dtype)  # [B, H, w g, 1 + S]
        weights = (scores + window.bias).softmax(dim=-1).to(window.values.dtype)
        return self.out(rearrange(weights @ window.values, "b h (w g) d -> b w (h g d)", w=state.shape[1]))

    def read_packed(self, state: Tensor, step: int, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Attend from all positions of packed sequences at once, each as in `forward`, and return the attended values.

        Args:
            state: The state of each anchor at the anchor's position, `[B, T, D]`; undefined elsewhere.
            step: Number of the draft step that made the states, from 0.
            keys: The empty entry, then the key of the first token of each pair, `[B, T, H, d]`.
            values: The empty entry, then the value of the second token of each pair, `[B, T, H, d]`.
            mask: The entries that each anchor attends to, `[B, T, T]` bool, from `packed_mask`.

        Returns:
            `[B, T, D]`.
        """
        position = torch.arange(state.shape[1], device=state.device) + 1 + step
        query, dtype = self._queries(state, position), values.dtype  # [B, T, h, d]
        copies = query.shape[2] // keys.shape[2]
        with sdpa_kernel(BACKENDS):
            attended = scaled_dot_product_attention(
                rearrange(query.to(dtype), "b t h d -> b h t d"),
                repeat(keys.to(dtype), "b s h d -> b (h copies) s d", copies=copies),
                repeat(values, "b s h d -> b (h copies) s d", copies=copies),
                attn_mask=mask[:, None],
            )
        return self.out(rearrange(attended, "b h t d -> b t (h d)"))

    def _queries(self, state: Tensor, position: Tensor) -> Tensor:
        """Return the queries of states `[..., D]` at positions that broadcast to `[...]`, `[..., h, d]`."""
        query = torch.unflatten(self.query(normalise(state, self.eps)), -1, (-1, self.size))
        return _rotate(normalise(query, self.eps) * self.scale, position)


class PackedContext:
    """The keys and values of a batch's sequences, and the entries that each anchor attends to.

    All positions attend at once, as queries of one product, with the anchors' states at their positions and zeros
    elsewhere.

    Args:
        attention: The drafter's attention to committed tokens.
        config: The architecture of the drafter.
        hidden: Hidden states of all tokens as `RecurrentDrafter.fuse_hidden` returns them, `[B, T, D]`.
        embedding: The base's embeddings of the tokens, `[B, T, D]`.
        segment: Number of the text that each token belongs to within its row, `[B, T]`; None for one text a row.
        anchors: Flat positions of the anchors, `[A]` int64. Only position 0 may occur several times: no pair ends
            there, so it reads nothing, and its state gets no gradient from here.
    """

    def __init__(
        self,
        attention: ContextAttention,
        config: DrafterConfig,
        hidden: Tensor,
        embedding: Tensor,
        segment: Tensor | None,
        anchors: Tensor,
    ):
        rows, length, _ = hidden.shape
        self._attention, self._shape, self._anchors = attention, (rows, length), anchors
        keys, values = attention.remember(hidden, embedding, torch.arange(length, device=hidden.device))
        self._keys, self._values = pad(keys[:, :-1], EMPTY_ENTRY), pad(values[:, 1:], EMPTY_ENTRY)
        self._mask = packed_mask(segment, rows, length, window=config.context_window or 0, device=hidden.device)

    def attend(self, step: int, state: Tensor) -> Tensor:
        """Attend from the anchors' states after a draft step to the texts, and return the attended values, `[A, D]`.

        `step` counts draft steps from 0; `state` is the state of each anchor, `[A, D]`.
        """
        rows, length = self._shape
        # A dense grid of queries lets one fused kernel serve all anchors, however they are spread.
        grid = state.new_zeros(rows * length, state.shape[-1]).index_copy(0, self._anchors, state)
        grid = grid.unflatten(0, (rows, length))  # [B, T, D]
        attended = self._attention.read_packed(grid, step, self._keys, self._values, self._mask)
        return attended.flatten(0, 1).index_select(0, self._anchors)


def packed_mask(segment: Tensor | None, rows: int, length: int, window: int, device: torch.device) -> Tensor:
    """Return which entries each anchor of packed texts attends to: the empty one, and pairs of neighbouring tokens.

    The anchor is the last committed token, so pairs that end after it are excluded.

    Args:
        segment: Number of the text that each token belongs to within its row, `[B, T]`; None for one text a row.
        rows: B, rows.
        length: T, tokens of a row.
        window: Most pairs that an anchor attends to.
        device: Where the mask goes.

    Returns:
        `[B, T, T]` bool: for each anchor's position, the empty entry, and the pairs by position of their first token.
    """
    index = torch.arange(length, device=device)
    distance = index[:, None] - index
    visible = ((distance >= 1) & (distance <= window)).expand(rows, -1, -1)
    if segment is not None:
        visible = visible & (segment[:, :, None] == segment[:, None])
    return pad(visible[:, :, :-1], (1, 0), value=True)


def _rotate(x: Tensor, position: Tensor) -> Tensor:
    """Rotate heads `[..., h, d]` by positions that broadcast to `[...]`, and return them in their dtype."""
    size = x.shape[-1]
    frequency = ROPE_THETA ** (torch.arange(0, size, 2, device=x.device) / -size)  # [d / 2]
    return rotate(x, Sines.at(position, frequency, 1.0))
