"""Tiles of keys and values between a kernel and a cache, whose numbers may be FP8; `cache_format` is the reference.

`LARGEST` is what `cache_format.largest_number` says of the cache. FP8 is e4m3 or e5m2; both are exact in float16 and
bfloat16, so reading rounds nothing.
"""

import triton
import triton.language as tl

__all__ = ["from_cache", "round_trip", "to_cache"]


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
