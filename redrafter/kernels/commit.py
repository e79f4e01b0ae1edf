"""Moving an accepted path's keys and values next to the committed ones: one launch for all layers of a pool."""

import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.block_size import BLOCK_SIZE

__all__ = ["commit"]

CHUNK = 256  # numbers of a slot that one program moves


@triton.jit(do_not_specialize=["blocks", "depth"])
def _move(
    POOL, LENGTH, NODES, TABLE, layer_stride, width, blocks, depth,
    PAGE: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    d, c = tl.arange(0, BLOCK_D), tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    n = tl.load(LENGTH + row)
    to = n + d
    source = n + tl.load(NODES + row * depth + d, d < depth, 0)
    inside = (d < depth) & (to // PAGE < blocks) & (source // PAGE < blocks)
    from_slot = tl.load(TABLE + row * blocks + source // PAGE, inside, 0).to(tl.int64) * PAGE + source % PAGE
    to_slot = tl.load(TABLE + row * blocks + to // PAGE, inside, 0).to(tl.int64) * PAGE + to % PAGE
    held = inside[:, None] & (c < width)[None, :]
    pool = POOL + layer * layer_stride
    moved = tl.load(pool + from_slot[:, None] * width + c[None, :], held)
    tl.debug_barrier()  # a slot may be read by one thread and written by another: all reads come first
    tl.store(pool + to_slot[:, None] * width + c[None, :], moved, held)


def commit(pool: Tensor, table: Tensor, length: Tensor, nodes: Tensor) -> None:
    """pool: `[G, slots, heads, dim]`, written in place. table: `[B, M]` int32. length: `[B]`. nodes: `[B, K+1]`: node
    `nodes[b, d]` goes from slot `length[b] + nodes[b, d]` of its row to slot `length[b] + d`."""
    rows, depth = nodes.shape
    layers, slots, heads, dim = pool.shape
    width = heads * dim
    _move[(rows, layers, triton.cdiv(width, CHUNK))](
        pool, length, nodes.contiguous(), table, slots * width, width, table.shape[1], depth,
        PAGE=BLOCK_SIZE, BLOCK_D=triton.next_power_of_2(depth), CHUNK=CHUNK,
    )  # fmt: skip
