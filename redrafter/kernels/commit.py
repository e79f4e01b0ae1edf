"""Commit of an accepted path: its keys and values move next to the committed ones, all layers in one launch."""

import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.kernels.cache_format import as_bytes

CHUNK = 256  # elements of each slot that one program moves


@triton.jit(do_not_specialize=["blocks", "table_stride", "depth"])
def _move_kernel(
    POOL, LENGTH, NODES, TABLE, layer_stride, width, blocks, table_stride, depth,
    PAGE: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Copy the keys (or values) of a row's accepted nodes to the slots behind its committed tokens, in one layer.

    `NODES[row, d]` is the accepted node at depth d. It is copied from slot `LENGTH[row] + NODES[row, d]` of the row to
    slot `LENGTH[row] + d`; `TABLE` says in which blocks of the pool the slots are. The grid is (rows, layers, chunks):
    each program copies `CHUNK` of the `width` elements of every such slot.
    """
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    d, c = tl.arange(0, BLOCK_D), tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    n = tl.load(LENGTH + row)
    destination = n + d
    source = n + tl.load(NODES + row * depth + d, d < depth, 0)
    inside = (d < depth) & (destination // PAGE < blocks) & (source // PAGE < blocks)
    from_slot = tl.load(TABLE + row * table_stride + source // PAGE, inside, 0).to(tl.int64) * PAGE + source % PAGE
    to_block = tl.load(TABLE + row * table_stride + destination // PAGE, inside, 0).to(tl.int64)
    to_slot = to_block * PAGE + destination % PAGE
    mask = inside[:, None] & (c < width)[None, :]
    pool = POOL + layer * layer_stride
    moved = tl.load(pool + from_slot[:, None] * width + c[None, :], mask)
    tl.debug_barrier()  # a slot may be read by one thread and written by another: all reads come first
    tl.store(pool + to_slot[:, None] * width + c[None, :], moved, mask)


def commit(pool: Tensor, table: Tensor, length: Tensor, nodes: Tensor) -> None:
    """Move node `nodes[b, d]` from slot `length[b] + nodes[b, d]` of its row to slot `length[b] + d`.

    Args:
        pool: Keys or values of G layers, `[G, slots, heads, dim]`; written in place.
        table: Blocks of each row, `[B, M]` int32; it may be the first columns of a wider one.
        length: Committed tokens of each row, `[B]` int64.
        nodes: Accepted nodes by depth, `[B, K+1]` int64.
    """
    rows, depth = nodes.shape
    layers, slots, heads, dim = pool.shape
    width = heads * dim
    _move_kernel[(rows, layers, triton.cdiv(width, CHUNK))](
        as_bytes(pool), length, nodes.contiguous(), table, slots * width, width, table.shape[1], table.stride(0), depth,
        PAGE=BLOCK_SIZE, BLOCK_D=triton.next_power_of_2(depth), CHUNK=CHUNK,
    )  # fmt: skip
