"""Attention of an MTP layer, a decoder layer of transformers, to entries of the text and of drafts.

The entries of a text are in a paged cache, or in copies of the nearest ones; or only those of the layer are wanted.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from redrafter.attention.tree_attention import explicit_attention, register_attention
from redrafter.drafting.paged_entries import PagedEntries
from redrafter.kernels.attention_inputs import TokenRows


class Made(Exception):
    """No error: ends the forward of a layer with the keys and values that it would attend to."""


@dataclass(frozen=True)
class Past:
    """Keys and values of the text that the drafts of B rows attend to, with room for those of the drafts after them.

    Attributes:
        keys: S entries of each row and then room, `[B, H, S + n, d]`.
        values: Likewise.
        seen: Which of the S entries a row has, `[B, S]` bool.
    """

    keys: Tensor
    values: Tensor
    seen: Tensor


class PagedMTPPast(NamedTuple):
    """Entries in a paged cache that w beams of B rows attend to, and those that they store there.

    Attributes:
        entries: Keys and values of the text, and room for those of drafts.
        rows: The beams as new nodes, which see the drafts on their paths.
        window: Positions that they see, back from their own.
    """

    entries: PagedEntries
    rows: TokenRows
    window: int


class Recording(NamedTuple):
    """Takes the keys and values that a layer would attend to. What follows them is not used, and so not compiled.

    Attributes:
        made: Keys and values, `[B, H, w, d]` each.
    """

    made: list[tuple[Tensor, Tensor]]


# Entries that a running layer attends to in addition to its own input; None for a layer whose keys are wanted.
RUNNING_PAST: ContextVar[Past | PagedMTPPast | None] = ContextVar("mtp_past", default=None)


class DraftedEntries:
    """Keeps what a decoder layer stores of drafts, in place of the cache that transformers gives it."""

    def __init__(self) -> None:
        self._stored: tuple[Tensor, ...] = ()

    def update(self, *states: Any, **_: Any) -> tuple[Tensor, ...]:
        """Append two tensors `[B, H, w, d]`, and return all; later entries of the call are not needed."""
        new: tuple[Tensor, ...] = states[:2]
        if self._stored:
            new = tuple(torch.cat(pair, dim=2) for pair in zip(self._stored, new, strict=True))
        self._stored = new
        return new

    def get_seq_length(self, *_: Any) -> int:
        """Return the number of entries."""
        return self._stored[0].shape[2] if self._stored else 0


def attend_to_past(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    past: Past | PagedMTPPast | Recording | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend to `past` and to entries of drafts, `[B, H, n, d]`, as an attention function of transformers.

    `past` is `RUNNING_PAST` for a layer that passes no keyword arguments to its attention.
    """
    past = RUNNING_PAST.get() if past is None else past
    if isinstance(past, PagedMTPPast):
        dtype = past.entries.keys.dtype
        query, key, value = (x.transpose(1, 2).to(dtype) for x in (query, key, value))  # [B, w, H, d] each
        out = past.entries.attend(
            query, key, value, past.rows, scale=scaling, window=past.window, softcap=softcap or 0.0, sinks=s_aux
        )
        return out, None
    if isinstance(past, Recording):
        past.made.append((key, value))
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None
    if past is None:
        # The keys and values are all that is wanted; an exception spares the attention and MLP of the layer.
        raise Made(key, value)
    size, count = past.seen.shape[1], key.shape[2]
    # In place, as the room for drafts was allocated with the text's entries: no copy of these at each step.
    past.keys[:, :, size : size + count], past.values[:, :, size : size + count] = key, value
    out = explicit_attention(
        query,
        past.keys[:, :, : size + count],
        past.values[:, :, : size + count],
        attention_mask,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap or 0.0,
        s_aux,
    )
    return out.transpose(1, 2), None


ATTENTION_NAME = "redrafter_mtp"
register_attention(ATTENTION_NAME, attend_to_past)
