"""Forms of a recurrent drafter, as options of commands. This module imports no torch."""

RECURRENCES = ("apple", "trtllm", "gated")
CONTEXT_HEADS, CONTEXT_KV_HEADS, CONTEXT_HEAD_DIM = 4, 1, 64  # defaults of a drafter with context attention
