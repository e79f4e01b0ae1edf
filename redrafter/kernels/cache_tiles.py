"""Keys and values between kernels and a paged cache, whose numbers may be FP8; `cache_format` is the reference.

`LARGEST` is the result of `cache_format.largest_number` for the cache. FP8 is e4m3 or e5m2; both are exact in float16
and bfloat16, so reading does not round.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.attention_inputs import AttentionInputs
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.kernels.cache_format import as_bytes, largest_number
from redrafter.kernels.launch import supports_dependent_launch, widening_assembly

CHUNK = 256  # elements of each slot that one program moves


@triton.jit
def to_cache(x, STORE, LARGEST: tl.constexpr):
    """Return a tile in the storage format of a cache."""
    if LARGEST > 0:
        x = tl.clamp(x.to(tl.float32), -LARGEST, LARGEST)
    return x.to(STORE.dtype.element_ty)


@triton.jit
def from_cache(x, q, LARGEST: tl.constexpr, WIDEN: tl.constexpr):
    """Return a tile of a cache in the dtype of the queries, converted by `widening_assembly` where available."""
    if WIDEN is not None:
        narrow = x.to(tl.uint8, bitcast=True)
        x = tl.inline_asm_elementwise(WIDEN, "=r,=r,r", [narrow], q.dtype, is_pure=True, pack=4)
    elif LARGEST > 0:
        x = x.to(q.dtype)
    return x


@triton.jit
def round_trip(x, STORE, q, LARGEST: tl.constexpr):
    """Return a tile of new keys or values with the rounding of the cache."""
    if LARGEST > 0:
        x = to_cache(x, STORE, LARGEST).to(q.dtype)
    return x


@triton.jit
def is_lost(value, LARGEST: tl.constexpr):
    """Return which tokens of a tile of values `[S, DV]` have a number that is not finite, and in FP8 is NaN.

    The value of such a token is replaced by 0 and its key by NaN. So the error reaches only the tokens that see it, by
    their scores: others have a weight of 0 for it, and 0 * NaN is NaN.
    """
    finite = value == value
    if LARGEST == 0:
        finite = tl.abs(value) < float("inf")
    return tl.max(tl.where(finite, 0, 1), 1) > 0


@triton.jit
def cached_at(STORE, TABLE, s, seen, blocks, stride, head, WIDTH: tl.constexpr, PAGE: tl.constexpr):
    """Return the addresses of a head's keys or values at positions of the row with block table `TABLE`."""
    page = tl.load(TABLE + s // PAGE, seen & (s // PAGE < blocks), 0).to(tl.int64)
    return STORE + (page * PAGE + s % PAGE) * stride + head * WIDTH


@triton.jit
def store_new(
    K, V, KEYS, VALUES, TABLE, token, position, own, k_token, k_head, v_token, v_head, cache_k, cache_v, blocks, head,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    """Store a head's keys and values of tokens in the cache, at positions of their row."""
    dk, dv = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV)
    key = tl.load(K + token[:, None] * k_token + head * k_head + dk, own[:, None] & (dk < DK), 0.0)
    value = tl.load(V + token[:, None] * v_token + head * v_head + dv, own[:, None] & (dv < DV), 0.0)
    lost = is_lost(value, LARGEST)
    key = tl.where(lost[:, None], float("nan"), key).to(K.dtype.element_ty)
    value = tl.where(lost[:, None], 0.0, value).to(V.dtype.element_ty)
    inside = own & (position // PAGE < blocks)
    k_at = cached_at(KEYS, TABLE, position, inside, blocks, cache_k, head, DK, PAGE)
    v_at = cached_at(VALUES, TABLE, position, inside, blocks, cache_v, head, DV, PAGE)
    tl.store(k_at[:, None] + dk, to_cache(key, KEYS, LARGEST), inside[:, None] & (dk < DK))
    tl.store(v_at[:, None] + dv, to_cache(value, VALUES, LARGEST), inside[:, None] & (dv < DV))


def storing_sizes(inputs: AttentionInputs) -> dict[str, object]:
    """Return how a kernel that stores new keys and values is compiled and launched."""
    dk, dv = inputs.query.shape[2], inputs.value.shape[2]
    assert inputs.query.stride(2) == inputs.key.stride(2) == inputs.value.stride(2) == 1, (
        "a head's vector is contiguous"
    )
    follow = supports_dependent_launch(inputs.query.device)
    return dict(
        DK=dk, DV=dv, BLOCK_DK=max(triton.next_power_of_2(dk), 16), BLOCK_DV=max(triton.next_power_of_2(dv), 16),
        PAGE=BLOCK_SIZE, LARGEST=largest_number(inputs.keys.dtype), FOLLOW=follow, launch_pdl=follow,
    )  # fmt: skip


def attending_sizes(inputs: AttentionInputs) -> dict[str, Any]:
    """Return the compile and launch options of an attention kernel, in addition to its tiling."""
    (heads, group), widen = inputs.heads, widening_assembly(inputs.keys.dtype, inputs.query.dtype, inputs.query.device)
    bounds = dict(WINDOW=inputs.window, SOFTCAP=inputs.softcap)
    return storing_sizes(inputs) | bounds | dict(HEADS=heads, GROUP=group, WIDEN=widen)


@triton.jit(do_not_specialize=["blocks", "table_stride", "depth"])
def _move_kernel(
    POOL, LENGTH, NODES, TABLE, layer_stride, width, blocks, table_stride, depth,
    PAGE: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Copy the keys (or values) of a row's accepted nodes to the slots after its committed tokens, in one layer.

    `NODES[row, d]` is the accepted node at depth d. It is copied from slot `LENGTH[row] + NODES[row, d]` of the row to
    slot `LENGTH[row] + d`; `TABLE` has the row's blocks in the pool. The grid is (rows, layers, chunks): each program
    copies `CHUNK` of the `width` elements of every such slot.
    """
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    d, c = tl.arange(0, BLOCK_D), tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    n = tl.load(LENGTH + row)
    destination = n + d
    source = n + tl.load(NODES + row * depth + d, d < depth, 0)
    # A row near its end may have no block for its last nodes, which are never kept.
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
