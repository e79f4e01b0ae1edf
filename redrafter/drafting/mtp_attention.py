"""Attention of an MTP layer, a decoder layer of transformers, to entries of the text and of drafts.

The entries of a text are in the target's cache; or only those of the layer are wanted.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from redrafter.attention.tree_attention import register_attention
from redrafter.drafting.paged_entries import PagedEntries
from redrafter.errors import UnsupportedError
from redrafter.kernels.attention_inputs import TokenRows


class Made(Exception):
    """No error: ends the forward of a layer once a `Recording` has its keys and values."""


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
    """Takes the keys and values that a layer would attend to. What follows them is not computed.

    Attributes:
        made: Keys and values, `[B, H, w, d]` each.
    """

    made: list[tuple[Tensor, Tensor]]


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

    Raises:
        UnsupportedError: The layer does not pass on `past`.
    """
    if past is None:
        raise UnsupportedError(
            f"the layer of {type(module).__name__} passes no keyword arguments to it, so it cannot be an MTP layer here"
        )
    if isinstance(past, Past):
        dtype, stored = query.dtype, past.entries.keys.dtype
        query, key, value = (x.transpose(1, 2).to(stored) for x in (query, key, value))  # [B, w, H, d] each
        out = past.entries.attend(
            query, key, value, past.rows, scale=scaling, window=past.window, softcap=softcap or 0.0, sinks=s_aux
        )
        return out.to(dtype), None
    past.made.append((key, value))
    if not torch.compiler.is_compiling():  # a compiler leaves out unused code
        raise Made
    return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


ATTENTION_NAME = "redrafter_mtp"
register_attention(ATTENTION_NAME, attend_to_past)
