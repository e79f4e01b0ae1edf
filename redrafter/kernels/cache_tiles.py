"""Tiles of keys and values between a kernel and a cache, whose numbers may be FP8; `cache_format` is the reference.

`LARGEST` is what `cache_format.largest_number` says of the cache. FP8 is e4m3 or e5m2; both are exact in float16 and
bfloat16, so reading rounds nothing.
"""

import triton
import triton.language as tl


@triton.jit
def to_cache(x, STORE, LARGEST: tl.constexpr):
    """Return a tile as a cache stores it."""
    if LARGEST > 0:
        x = tl.clamp(x.to(tl.float32), -LARGEST, LARGEST)
    return x.to(STORE.dtype.element_ty)


@triton.jit
def from_cache(x, q, LARGEST: tl.constexpr, WIDEN: tl.constexpr):
    """Return a tile of a cache in the dtype of the queries, by what `widening_assembly` returns where it does."""
    if WIDEN is not None:
        narrow = x.to(tl.uint8, bitcast=True)
        x = tl.inline_asm_elementwise(WIDEN, "=r,=r,r", [narrow], q.dtype, is_pure=True, pack=4)
    elif LARGEST > 0:
        x = x.to(q.dtype)
    return x


@triton.jit
def round_trip(x, STORE, q, LARGEST: tl.constexpr):
    """Return a tile of new keys or values as it is read back later."""
    if LARGEST > 0:
        x = to_cache(x, STORE, LARGEST).to(q.dtype)
    return x


@triton.jit
def cached_at(STORE, TABLE, s, seen, blocks, stride, head, WIDTH: tl.constexpr, PAGE: tl.constexpr):
    """Return the addresses of a head's keys or values at positions of the row whose blocks `TABLE` has."""
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
    inside = own & (position // PAGE < blocks)
    k_at = cached_at(KEYS, TABLE, position, inside, blocks, cache_k, head, DK, PAGE)
    v_at = cached_at(VALUES, TABLE, position, inside, blocks, cache_v, head, DV, PAGE)
    tl.store(k_at[:, None] + dk, to_cache(key, KEYS, LARGEST), inside[:, None] & (dk < DK))
    tl.store(v_at[:, None] + dv, to_cache(value, VALUES, LARGEST), inside[:, None] & (dv < DV))
