"""Forms of a recurrent drafter, as options of commands. This module imports no torch."""

from collections.abc import Callable

from redrafter.errors import ArgumentError

RECURRENCES = ("apple", "trtllm", "gated")
CONTEXT_HEADS, CONTEXT_KV_HEADS, CONTEXT_HEAD_DIM = 4, 1, 64  # defaults of a drafter with context attention
SHORTLIST_RANK = 128  # default rank of the rough scores of a head in two stages


def check_shortlist_rank(size: int | None, rank: int) -> None:
    """Raise `ArgumentError` for a rank of rough scores, other than the default, where a head has no first stage."""
    if size is None and rank != SHORTLIST_RANK:
        raise ArgumentError("--head-shortlist-rank is for heads of two stages: give --head-shortlist too")


def check_context_heads(heads: int, kv_heads: int, head_dim: int, name: Callable[[str], str]) -> None:
    """Raise `ArgumentError` for heads of the attention to the text that no drafter can have.

    `name` returns what the user calls `context_heads`, `context_kv_heads` or `context_head_dim`.
    """
    if heads % kv_heads:
        raise ArgumentError(
            f"{name('context_heads')} must be a multiple of {name('context_kv_heads')}={kv_heads}, got {heads}"
        )
    if head_dim % 2:
        raise ArgumentError(f"{name('context_head_dim')} must be even, got {head_dim}")
