"""Forms of a recurrent drafter, as options of commands. This module imports no torch."""

from redrafter.errors import ArgumentError

RECURRENCES = ("apple", "trtllm", "gated")
CONTEXT_HEADS, CONTEXT_KV_HEADS, CONTEXT_HEAD_DIM = 4, 1, 64  # defaults of a drafter with context attention
SHORTLIST_RANK = 128  # default rank of the rough scores of a head in two stages


def check_shortlist_rank(size: int | None, rank: int) -> None:
    """Raise `ArgumentError` for a rank of rough scores, other than the default, where a head has no first stage."""
    if size is None and rank != SHORTLIST_RANK:
        raise ArgumentError("--head-shortlist-rank is for heads of two stages: give --head-shortlist too")
