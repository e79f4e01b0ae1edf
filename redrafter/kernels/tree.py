"""The ancestors of every node of a tree, found by walking up from each node."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["nodes", "levels"])
def _ancestors_kernel(PARENTS, OUT, nodes, levels, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Mark the ancestors of a block of nodes of one row."""
    row = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = node < nodes
    other = tl.arange(0, WIDTH)
    tl.store(OUT + (row * nodes + node)[:, None] * nodes + other, 0, live[:, None] & (other < nodes))
    tl.debug_barrier()
    at = node.to(tl.int64)
    for _ in range(levels + 1):
        tl.store(OUT + (row * nodes + node) * nodes + at, 1, live)
        at = tl.load(PARENTS + row * nodes + at, live, 0)


def find_ancestors(parents: Tensor, max_depth: int) -> Tensor:
    """Return which nodes are a node itself or its ancestors, `[B, N, N]` bool, as in `Tree.ancestors`.

    Args:
        parents: Index of each node's parent, `[B, N]` int64; the root is its own.
        max_depth: At least the depth of every node.
    """
    rows, nodes = parents.shape
    out = torch.empty(rows, nodes, nodes, dtype=torch.bool, device=parents.device)
    _ancestors_kernel[(rows, triton.cdiv(nodes, 32))](
        parents.contiguous(),
        out.view(torch.uint8),
        nodes,
        max_depth,
        BLOCK=32,
        WIDTH=triton.next_power_of_2(nodes),
        num_warps=1,
    )
    return out
