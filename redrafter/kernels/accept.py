"""Acceptance of drafts on a GPU: a step's path, report and new length of each row, in one launch.

`redrafter.tree.report.accept_drafts` is the reference. In plain torch it is some fifty launches of two microseconds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(
    do_not_specialize=[
        "tokens_row", "parents_row", "depth_row", "drawn_row", "drawn_node", "finite_row", "finite_node", "texts_row",
        "nodes", "levels", "width", "first_copied",
    ]
)  # fmt: skip
def _accept_kernel(
    TOKENS, PARENTS, DEPTH, DRAWN, FINITE, TEXTS, LENGTH, ACTIVE, COUNTS, LIMITS,
    NODES, PACKED, AFTER, tokens_row, parents_row, depth_row, drawn_row, drawn_node, finite_row, finite_node, texts_row,
    nodes, levels, width, first_copied, BLOCK: tl.constexpr, BLOCK_PATH: tl.constexpr,
):  # fmt: skip
    """Accept the drafts of one row.

    Each node walks up to the root and checks that every token on its way was drawn at the parent. The deepest node
    that reaches it is the end of the path, which is then read upwards.
    """
    row = tl.program_id(0).to(tl.int64)
    node, entry = tl.arange(0, BLOCK), tl.arange(0, BLOCK_PATH)
    TOKENS, PARENTS, DEPTH = TOKENS + row * tokens_row, PARENTS + row * parents_row, DEPTH + row * depth_row
    DRAWN, FINITE = DRAWN + row * drawn_row, FINITE + row * finite_row
    depth = tl.load(DEPTH + node, node < nodes, 0)
    count = nodes if COUNTS is None else tl.load(COUNTS + row)
    verified = node < count
    acceptable = verified
    if LIMITS is not None:
        acceptable = acceptable & (depth <= tl.load(LIMITS + row))
    # Ancestors are checked too: the scores of a node and its parent may be out of order by rounding.
    agreed, at = acceptable | (node == 0), node.to(tl.int64)
    for _ in range(levels):
        parent = tl.load(PARENTS + at, acceptable, 0)
        token, draw = tl.load(TOKENS + at, acceptable, 0), tl.load(DRAWN + parent * drawn_node, acceptable, 0)
        agreed, at = agreed & ((at == 0) | (at < count) & (token == draw)), parent
    accepted, end = tl.max(tl.where(agreed, depth, -1), 0, return_indices=True)
    path, at = tl.zeros([BLOCK_PATH], tl.int64), end.to(tl.int64)
    for step in range(levels):
        path = tl.where(entry == accepted - step, at, path)
        at = tl.load(PARENTS + at)
    inside, line = entry < width, PACKED + row * (width + 4)
    token = tl.load(DRAWN + path * drawn_node, inside, 0)
    finite = tl.load(FINITE + path * finite_node, inside, 0)
    n = tl.load(LENGTH + row)
    tl.store(NODES + row * width + entry, path, inside)
    tl.store(line + entry, token, inside)
    tl.store(TEXTS + row * texts_row + n + 1 + entry, token, inside)
    tl.store(line + width, accepted)
    tl.store(line + width + 1, tl.sum(acceptable.to(tl.int64), 0) - 1)
    tl.store(line + width + 2, tl.min(tl.where(inside & (finite == 0), entry, width), 0))
    tl.store(line + width + 3, tl.sum((path >= first_copied).to(tl.int64), 0))
    tl.store(AFTER + row, tl.where(tl.load(ACTIVE + row) != 0, n + accepted + 1, n))


def accept_drafts(
    tokens: Tensor,
    parents: Tensor,
    depth: Tensor,
    drawn: Tensor,
    finite: Tensor,
    texts: Tensor,
    length: Tensor,
    active: Tensor,
    *,
    levels: int,
    width: int,
    grafted: int,
    counts: Tensor | None,
    limits: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept drafts as `redrafter.tree.report.accept_drafts` does, with the fields of a tree as arguments.

    Args:
        tokens: As in `Tree`, and so are parents, depth, levels, grafted and counts.
        parents: See there.
        depth: See there.
        drawn: As there, and so are finite, texts, length, active and limits.
        finite: See there.
        texts: See there.
        length: See there.
        active: See there.
        levels: See there.
        width: K + 1.
        grafted: See there.
        counts: See there.
        limits: See there.

    Returns:
        The accepted nodes `[B, K+1]`, the packed report `[B, K+5]`, and the lengths after the step `[B]`, int64.
    """
    rows, nodes = drawn.shape
    path, after = texts.new_empty(rows, width), torch.empty_like(length)
    packed = texts.new_empty(rows, width + 4)
    strides = *(x.stride(0) for x in (tokens, parents, depth)), *drawn.stride(), *finite.stride(), texts.stride(0)
    _accept_kernel[(rows,)](
        tokens, parents, depth, drawn, finite, texts, length, active.view(torch.uint8), counts, limits,
        path, packed, after, *strides, nodes, levels, width, nodes - grafted,
        BLOCK=triton.next_power_of_2(nodes), BLOCK_PATH=triton.next_power_of_2(width),
        num_warps=1,
    )  # fmt: skip
    return path, packed, after
