"""Order the nodes of token trees as tokens of a forward, and find their slots in a paged cache, in one launch each."""

import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.block_size import BLOCK_SIZE

PART = 128  # nodes of a program: a prompt is a chain of thousands, which one program would not hold in registers


@triton.jit(do_not_specialize=["rows", "nodes"])
def _order_kernel(
    COUNTS, STARTS, ROWS, NODES, BY_ROW, rows, nodes, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write some tokens of one row."""
    row, other = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_ROWS)
    node = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    counts = tl.load(COUNTS + other, other < rows, 0)
    start, count = tl.sum(tl.where(other < row, counts, 0), 0), tl.load(COUNTS + row)
    tl.store(STARTS + row, start)
    tl.store(STARTS + rows, tl.sum(counts, 0), row == 0)
    tl.store(BY_ROW + row * nodes + node, start + tl.minimum(node, count - 1), node < nodes)
    tl.store(ROWS + start + node, row + 0 * node, node < count)
    tl.store(NODES + start + node, row * nodes + node, node < count)


def token_order(counts: Tensor, nodes: int, total: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Order nodes as `redrafter.tree.token_tree.token_order` does, with the same arguments and results."""
    rows = len(counts)
    starts, (of_token, index) = counts.new_empty(rows + 1), counts.new_empty(2, total)
    by_row = counts.new_empty(rows, nodes)
    _order_kernel[(rows, triton.cdiv(nodes, PART))](
        counts.contiguous(), starts, of_token, index, by_row, rows, nodes,
        BLOCK_ROWS=triton.next_power_of_2(rows), BLOCK=PART, num_warps=1,
    )  # fmt: skip
    return starts, of_token, index, by_row


@triton.jit(do_not_specialize=["parents_row", "depth_row", "table_row", "nodes", "new", "blocks"])
def _slots_kernel(
    PARENTS, DEPTH, LENGTH, TABLE, OUT, parents_row, depth_row, table_row, nodes, new, blocks,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the slots of some new nodes of one row, or where the second index is 1 of the tokens before them."""
    row, before = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    live, node = index < new, nodes - new + index
    parent = tl.load(PARENTS + row * parents_row + node, live, 0)
    parent = tl.where(tl.load(DEPTH + row * depth_row + node, live, 0) == 0, -1, parent)
    at = tl.load(LENGTH + row) + tl.where(before == 1, parent, node)
    at = tl.minimum(tl.maximum(at, 0), blocks * PAGE - 1)
    page = tl.load(TABLE + row * table_row + at // PAGE, live, 0).to(tl.int64)
    tl.store(OUT + (before * tl.num_programs(0) + row) * new + index, page * PAGE + at % PAGE, live)


def new_slots(parents: Tensor, depth: Tensor, length: Tensor, table: Tensor, new: int) -> Tensor:
    """Return the slots of new nodes in the pools of a paged cache, then of the token before each, `[2, B * M]` int64.

    Args:
        parents: Index of each node's parent, `[B, N]` int64.
        depth: Depth of each node, `[B, N]` int64.
        length: Committed tokens of each row, `[B]` int64.
        table: Blocks of each row, `[B, blocks]` int32.
        new: M, the number of new nodes, the last ones.
    """
    rows, nodes = parents.shape
    out = length.new_empty(2, rows * new)
    _slots_kernel[(rows, 2, triton.cdiv(new, PART))](
        parents, depth, length, table, out, *(x.stride(0) for x in (parents, depth, table)), nodes, new, table.shape[1],
        PAGE=BLOCK_SIZE, BLOCK=PART, num_warps=1,
    )  # fmt: skip
    return out
