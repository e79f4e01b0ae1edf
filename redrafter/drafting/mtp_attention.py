"""Attention of an MTP layer, a decoder layer of transformers, to entries of the text and of drafts.

The entries of a text are in the target's cache; or only those of the layer are wanted.
"""

from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor, nn

from redrafter.attention.tree_attention import register_attention
from redrafter.drafting.paged_entries import PagedEntries
from redrafter.kernels.attention_inputs import TokenRows


class Made(Exception):
    """No error: ends the forward of a layer with the keys and values that it would attend to."""


class Past(NamedTuple):
    """Entries in a cache that w beams of B rows attend to, and those that they store there.

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
RUNNING_PAST: ContextVar[Past | None] = ContextVar("mtp_past", default=None)


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
    past: Past | Recording | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend to `past`, which the entries of drafts are added to, as an attention function of transformers.

    `past` is `RUNNING_PAST` for a layer that passes no keyword arguments to its attention.
    """
    past = RUNNING_PAST.get() if past is None else past
    if isinstance(past, Past):
        dtype, stored = query.dtype, past.entries.keys.dtype
        query, key, value = (x.transpose(1, 2).to(stored) for x in (query, key, value))  # [B, w, H, d] each
        out = past.entries.attend(
            query, key, value, past.rows, scale=scaling, window=past.window, softcap=softcap or 0.0, sinks=s_aux
        )
        return out.to(dtype), None
    if isinstance(past, Recording):
        past.made.append((key, value))
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None
    # The keys and values are all that is wanted; an exception spares the attention and MLP of the layer.
    raise Made(key, value)


ATTENTION_NAME = "redrafter_mtp"
register_attention(ATTENTION_NAME, attend_to_past)
