"""Triton kernels for the GPU, each tested against a slow reference in plain torch.

`TRITON` is true if Triton is installed, so that the kernels can be called; otherwise callers use the references.
"""

from importlib.util import find_spec

__all__ = [
    "MAX_ROUNDED_WIDTH",
    "MAX_THIN_TOKENS",
    "MAX_WIDENED_TOKENS",
    "TRITON",
    "accept_drafts",
    "commit",
    "find_ancestors",
    "float8_product",
    "gumbel",
    "hold_best",
    "inbox_bytes",
    "is_supported_weight",
    "new_slots",
    "ordered_attention",
    "ordered_expert_linear",
    "ordered_linear",
    "peer_sum",
    "peer_sum_by_shares",
    "peer_sum_parts",
    "round_to_float8",
    "round_values",
    "sample_tokens",
    "share_inbox_bytes",
    "share_parts",
    "split_k_linear",
    "token_order",
    "top_continuations",
    "tree_attention",
    "widen_float8",
    "widened_product",
]

TRITON = find_spec("triton") is not None

if TRITON:
    from redrafter.kernels.accept import accept_drafts
    from redrafter.kernels.attention import tree_attention
    from redrafter.kernels.cache_tiles import commit
    from redrafter.kernels.float8_matmul import float8_product
    from redrafter.kernels.float8_rounding import MAX_ROUNDED_WIDTH, round_to_float8, round_values
    from redrafter.kernels.linear import (
        MAX_THIN_TOKENS,
        MAX_WIDENED_TOKENS,
        is_supported_weight,
        split_k_linear,
        widen_float8,
        widened_product,
    )
    from redrafter.kernels.ordered_attention import ordered_attention
    from redrafter.kernels.ordered_linear import ordered_expert_linear, ordered_linear
    from redrafter.kernels.peer_sum import (
        inbox_bytes,
        peer_sum,
        peer_sum_by_shares,
        peer_sum_parts,
        share_inbox_bytes,
        share_parts,
    )
    from redrafter.kernels.sample import gumbel, sample_tokens
    from redrafter.kernels.token_order import new_slots, token_order
    from redrafter.kernels.tree import find_ancestors, hold_best, top_continuations
