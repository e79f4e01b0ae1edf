"""Tree attention whose sums have one order: a token's attention has the same bits however it is computed.

A token's keys are visited by their absolute positions, in tiles of `TILE` positions. The online softmax restarts at
fixed positions, and the states of these splits are folded in order. So a token that is decoded alone, in a tree, or
within a prompt uses the same sums:

- For trees, one kernel attends to the tiles of committed tokens, which all nodes share. A second one, with a program
  for each node, gathers the node's own ancestors after them, and folds the splits.
- For chunks of prompts, whose tokens see all earlier tokens, one kernel does both.

Sixteen queries are multiplied by another tensor core instruction than 64, but in the same order. Weights are summed by
products with ones for the same reason. The kernels are compiled without fused multiply-adds, which a compiler would
place differently in each of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels import attention_inputs
from redrafter.kernels.attention import LOG2E, blocks_of_tile
from redrafter.kernels.attention_inputs import TOKEN_MULTIPLE, TOKENS_PER_CHUNK, AttentionInputs
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.kernels.cache_tiles import attending_sizes, cached_at, from_cache, store_new, storing_sizes

TILE, NEAR = tl.constexpr(attention_inputs.TILE), tl.constexpr(attention_inputs.NEAR)
NEAR_SPLIT, FAR_SPLIT = tl.constexpr(attention_inputs.NEAR_SPLIT), tl.constexpr(attention_inputs.FAR_SPLIT)
TARGET_PROGRAMS = 264  # programs to launch: about two for each multiprocessor of a large GPU
MAX_PART_BYTES = 256 << 20  # of the splits' results; beyond it one program computes all splits of its queries
MAX_QUERIES = 64  # of a program
SUMS = tl.constexpr(16)  # equal columns with the sums of weights, the minimum number of columns of a product


@triton.jit
def _split_of(position):
    """Return the number of the split that holds a position."""
    return tl.where(position < NEAR, position // NEAR_SPLIT, NEAR // NEAR_SPLIT + (position - NEAR) // FAR_SPLIT)


@triton.jit
def _split_end(position):
    """Return the end position of the split that holds a position."""
    size = tl.where(position < NEAR, NEAR_SPLIT, FAR_SPLIT)
    return (position // size + 1) * size


@triton.jit
def _split_start(split):
    """Return the first position of a split."""
    short = NEAR // NEAR_SPLIT
    return tl.where(split < short, split * NEAR_SPLIT, NEAR + (split - short) * FAR_SPLIT)


@triton.jit
def _store_part(PART, TOPS, at, top, total, acc, live, dv, DV: tl.constexpr):
    """Store the state of a softmax for each query, as part `at` of all parts."""
    tl.store(TOPS + at * 2, top, live)
    tl.store(TOPS + at * 2 + 1, tl.max(total, 1), live)
    tl.store(PART + at[:, None] * DV + dv, acc, live[:, None] & (dv < DV))


@triton.jit
def _load_part(PART, TOPS, at, live, dv, DV: tl.constexpr):
    """Return the state that `_store_part` stored: maximum, sum of weights, and weighted sum of values."""
    top = tl.load(TOPS + at * 2, live, float("-inf"))
    total = tl.load(TOPS + at * 2 + 1, live, 0.0)[:, None] + tl.zeros([at.shape[0], SUMS], tl.float32)
    return top, total, tl.load(PART + at[:, None] * DV + dv, live[:, None] & (dv < DV), 0.0)


@triton.jit
def _empty_softmax(QUERIES: tl.constexpr, WIDTH: tl.constexpr):
    """Return the state of a softmax over no keys: maximum, sums of weights, and weighted sum of values."""
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    return top, tl.zeros([QUERIES, SUMS], tl.float32), tl.zeros([QUERIES, WIDTH], tl.float32)


@triton.jit
def _update_softmax(q, k, v, visible, top, total, acc, scale, SOFTCAP: tl.constexpr):
    """Add one tile of keys to an online softmax; keys that are not visible add exactly nothing.

    The weights are summed by a product with ones, whose order of summation does not depend on the number of queries,
    as that of `tl.sum` would. All columns of `total` are the same.
    """
    x = tl.dot(q, k, input_precision="ieee") * scale
    if SOFTCAP > 0:
        x = SOFTCAP * (2 * tl.sigmoid(2 / SOFTCAP * x) - 1)  # tanh
    x = tl.where(visible, x * LOG2E, float("-inf"))
    new_top = tl.maximum(top, tl.max(x, 1))
    # A tile without any visible key must not change the state, and -inf - -inf is NaN.
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(x - anchor[:, None]).to(v.dtype)
    shrink = tl.exp2(top - anchor)
    ones = tl.full([TILE, total.shape[1]], 1.0, v.dtype)
    total = tl.dot(weights, ones, total * shrink[:, None], input_precision="ieee")
    return new_top, total, tl.dot(weights, v, acc * shrink[:, None], input_precision="ieee")


@triton.jit
def _fold(top, total, acc, split_top, split_total, split_acc):
    """Merge the result of one split into the result of the splits before it."""
    new_top = tl.maximum(top, split_top)
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
    old, new = tl.exp2(top - anchor)[:, None], tl.exp2(split_top - anchor)[:, None]
    return new_top, total * old + split_total * new, acc * old + split_acc * new


@triton.jit
def _finish(top, total, acc, SINKS, q_of, live, HAS_SINKS: tl.constexpr):
    """Return the attention of queries; sinks may have taken part of the softmax."""
    if HAS_SINKS:
        sink = tl.load(SINKS + q_of, live, 0.0).to(tl.float32) * LOG2E
        ones = tl.full(total.shape, 1.0, tl.float32)
        top, total, acc = _fold(top, total, acc, sink, ones, tl.zeros(acc.shape, tl.float32))
    total = tl.max(total, 1)
    # Rounded to nearest in all kernels: an approximate reciprocal may differ between them.
    return acc * tl.math.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.where(total > 0, total, 1.0))[:, None]


@triton.jit
def _first_tile(position, WINDOW: tl.constexpr):
    """Return the start of the first tile that a token at a position sees."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0) // TILE * TILE
    return first


@triton.jit(do_not_specialize=["blocks"])
def _store_chain_kernel(
    K, V, KEYS, VALUES, LENGTH, START, TABLE, k_token, k_head, v_token, v_head, cache_k, cache_v, blocks,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE: tl.constexpr,
    LARGEST: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    """Store the keys and values of `TILE` tokens of a row whose new tokens are a chain."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    node = tl.program_id(2) * TILE + tl.arange(0, TILE)
    n, offset = tl.load(LENGTH + row).to(tl.int32), tl.load(START + row)
    own = node < tl.load(START + row + 1) - offset
    if FOLLOW:
        tl.extra.cuda.gdc_wait()
    store_new(
        K, V, KEYS, VALUES, TABLE + row * blocks, offset + node, n + node, own, k_token, k_head, v_token, v_head,
        cache_k, cache_v, blocks, head, DK, DV, BLOCK_DK, BLOCK_DV, PAGE, LARGEST,
    )  # fmt: skip


@triton.jit(do_not_specialize=["nodes", "cached", "blocks", "parts", "tiles"])
def _attend_committed_kernel(
    Q, K, V, KEYS, VALUES, LENGTH, START, DEPTH, TABLE, PART, TOPS,
    q_token, q_head, k_token, k_head, v_token, v_head, cache_k, cache_v,
    scale, nodes, cached, blocks, parts, tiles,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    FOLDED: tl.constexpr, LARGEST: tl.constexpr, WIDEN: tl.constexpr, WIDE: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    """Store the new keys and values of a tile of queries, and attend with it to a split of its row's committed tokens.

    The results go to `PART` and `TOPS`; with `FOLDED`, one program computes all splits of its queries, and two parts
    are stored: all splits but the last folded, and the last. Only whole tiles are attended to; the tile with the row's
    first new position, and later ones, are left to `_attend_nodes_kernel`. `WIDE` is set if a layer's cache has too
    many numbers for 32-bit offsets.
    """
    row = tl.program_id(0).to(tl.int64)
    head, tile = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    n, offset = tl.load(LENGTH + row).to(tl.int32), tl.load(START + row)
    count = (tl.load(START + row + 1) - offset).to(tl.int32)
    if FOLLOW:
        tl.extra.cuda.gdc_wait()
    if tile * BLOCK_M >= count * GROUP:
        return
    TABLE += row * blocks
    whole, low = n // TILE * TILE, _first_tile(n, WINDOW)
    high = whole
    if not FOLDED:
        split = _split_of(low) + tl.program_id(2)
        low = tl.maximum(_split_start(split), low)
        high = tl.minimum(_split_end(_split_start(split)), whole)
        # Program 0 continues even without a tile, as it stores the new keys and values.
        if (tl.program_id(2) > 0) & (low >= high):
            return
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    node, q_of = m // GROUP, head * GROUP + m % GROUP
    live = node < count
    dk, dv, j = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV), tl.arange(0, TILE)
    token = offset + node
    q = tl.load(Q + token[:, None] * q_token + q_of[:, None] * q_head + dk, live[:, None] & (dk < DK), 0.0)
    position = n + tl.load(DEPTH + row * (cached + nodes) + cached + node, live, 0).to(tl.int32)
    # The programs of the other splits have the same tokens, whose keys need to be stored only once.
    if tl.program_id(2) == 0:
        store_new(
            K, V, KEYS, VALUES, TABLE, token, n + cached + node, live & (m % GROUP == 0),
            k_token, k_head, v_token, v_head, cache_k, cache_v, blocks, head, DK, DV, BLOCK_DK, BLOCK_DV, PAGE, LARGEST,
        )  # fmt: skip
    folded_top, folded_total, folded_acc = _empty_softmax(BLOCK_M, BLOCK_DV)
    top, total, acc = _empty_softmax(BLOCK_M, BLOCK_DV)
    keys, values = KEYS + head * DK, VALUES + head * DV

    # One loop over the tiles of all splits, so that tiles are prefetched across splits, which may have two tiles. The
    # blocks of a tile are read while the previous one is attended to.
    block = blocks_of_tile(TABLE, low, high, TILE, PAGE)
    for start in range(low, high, TILE):
        next_block = blocks_of_tile(TABLE, start + TILE, high, TILE, PAGE)
        s = start + j
        slot = block * PAGE + s % PAGE
        if WIDE:
            slot = slot.to(tl.int64)
        k = tl.load(keys + (slot * cache_k)[None, :] + dk[:, None], dk[:, None] < DK, 0.0)
        v = tl.load(values + (slot * cache_v)[:, None] + dv, dv < DV, 0.0)
        k, v = from_cache(k, q, LARGEST, WIDEN), from_cache(v, q, LARGEST, WIDEN)
        visible = live[:, None] & (s >= 0)[None, :]
        if WINDOW > 0:
            visible = visible & (position[:, None] - s[None, :] < WINDOW)
        if FOLDED:  # noqa: SIM102 -- decided when the kernel is compiled
            if (start > low) & (start == _split_start(_split_of(start))):
                # A split ends at the same positions for every query, so all of them restart together.
                folded_top, folded_total, folded_acc = _fold(folded_top, folded_total, folded_acc, top, total, acc)
                top, total, acc = _empty_softmax(BLOCK_M, BLOCK_DV)
        top, total, acc = _update_softmax(q, k, v, visible, top, total, acc, scale, SOFTCAP)
        block = next_block
    out = (token * (HEADS * GROUP) + q_of) * parts
    if FOLDED:
        _store_part(PART, TOPS, out, folded_top, folded_total, folded_acc, live, dv, DV)
        _store_part(PART, TOPS, out + 1, top, total, acc, live, dv, DV)
    elif low < high:
        _store_part(PART, TOPS, out + _split_of(low), top, total, acc, live, dv, DV)


@triton.jit(do_not_specialize=["nodes", "cached", "blocks", "parts", "tokens"])
def _attend_nodes_kernel(
    Q, KEYS, VALUES, LENGTH, START, DEPTH, ANCESTORS, TABLE, SINKS, OUT, PART, TOPS,
    q_token, q_head, cache_k, cache_v, scale, tokens, nodes, cached, blocks, parts,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, FOLDED: tl.constexpr, LARGEST: tl.constexpr, WIDEN: tl.constexpr,
    FOLLOW: tl.constexpr,
):  # fmt: skip
    """Attend with one new node to the positions from its row's last tile of committed tokens on, and fold all splits.

    Rows past the last one are padding, up to token `tokens`, whose output is set to 0.
    """
    row, node = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, tile = tl.program_id(2) % HEADS, tl.program_id(2) // HEADS
    dk, dv, j = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV), tl.arange(0, TILE)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live, q_of = m < GROUP, head * GROUP + m
    offset = tl.load(START + row)
    token = offset + node
    if FOLLOW:
        tl.extra.cuda.gdc_wait()
    if row == tl.num_programs(0) - 1:
        for step in range(0, tl.cdiv(tokens - token, tl.num_programs(1)).to(tl.int32)):
            out = OUT + ((token + step * tl.num_programs(1)) * (HEADS * GROUP) + q_of)[:, None] * DV + dv
            tl.store(out, tl.zeros([BLOCK_M, BLOCK_DV], OUT.dtype.element_ty), live[:, None] & (dv < DV))
        return
    n, end = tl.load(LENGTH + row).to(tl.int32), tl.load(START + row + 1)
    if token >= end:
        return
    all_nodes = cached + nodes
    q = tl.load(Q + token * q_token + q_of[:, None] * q_head + dk, live[:, None] & (dk < DK), 0.0)
    depth = tl.load(DEPTH + row * all_nodes + cached + node).to(tl.int32)
    position = n + depth
    other = tl.arange(0, BLOCK_N)
    is_ancestor = tl.load(ANCESTORS + (row * nodes + node) * all_nodes + other, other < all_nodes, 0) != 0
    ancestor_at = n + tl.load(DEPTH + row * all_nodes + other, other < all_nodes, 0).to(tl.int32)
    ancestor_at = tl.where(is_ancestor, ancestor_at, -1)  # position of each node on this one's path

    # The last split of the committed tokens, which may extend past them. Finished splits are stored as partial results.
    top, total, acc = _empty_softmax(BLOCK_M, BLOCK_DV)
    whole, first = n // TILE * TILE, _first_tile(n, WINDOW)
    part = (token * (HEADS * GROUP) + q_of) * parts
    # With a window, a deep node may see none of the committed tokens.
    tail = tl.maximum(whole, _first_tile(position, WINDOW))
    begin = _split_of(tl.where(tail > whole, tail, first))  # the first split that the node sees
    split = begin
    if (whole > first) & (tail == whole):
        split = _split_of(whole - 1)
        top, total, acc = _load_part(PART, TOPS, part + (1 if FOLDED else split), live, dv, DV)
    for step in tl.range(0, tl.cdiv(position + 1 - tail, TILE), num_stages=1):  # one tile or two
        low = tail + step * TILE
        if _split_of(low) != split:
            if FOLDED:
                old_top, old_total, old_acc = _load_part(PART, TOPS, part, live, dv, DV)
                top, total, acc = _fold(old_top, old_total, old_acc, top, total, acc)
                _store_part(PART, TOPS, part, top, total, acc, live, dv, DV)
            else:
                _store_part(PART, TOPS, part + split, top, total, acc, live, dv, DV)
            split = _split_of(low)
            top, total, acc = _empty_softmax(BLOCK_M, BLOCK_DV)
        s = low + j
        # The one ancestor at each position, selected by a sum over a one-hot mask: kernels cannot index registers.
        ancestor = tl.sum(tl.where(ancestor_at[None, :] == s[:, None], other[None, :], 0), 1)
        seen = s <= position
        slot = tl.where(s < n, s, n + ancestor)
        k_at = cached_at(KEYS, TABLE + row * blocks, slot, seen, blocks, cache_k, head, DK, PAGE)
        v_at = cached_at(VALUES, TABLE + row * blocks, slot, seen, blocks, cache_v, head, DV, PAGE)
        k = tl.load(k_at[None, :] + dk[:, None], seen[None, :] & (dk[:, None] < DK), 0.0)
        v = tl.load(v_at[:, None] + dv, seen[:, None] & (dv < DV), 0.0)
        k, v = from_cache(k, q, LARGEST, WIDEN), from_cache(v, q, LARGEST, WIDEN)
        visible = live[:, None] & seen[None, :]
        if WINDOW > 0:
            visible = visible & (position - s < WINDOW)[None, :]
        top, total, acc = _update_softmax(q, k, v, visible, top, total, acc, scale, SOFTCAP)
    if split > begin:
        if FOLDED:
            old_top, old_total, old_acc = _load_part(PART, TOPS, part, live, dv, DV)
        else:
            old_top, old_total, old_acc = _load_part(PART, TOPS, part + begin, live, dv, DV)
            # Four at once, whose loads do not wait for each other. Those past the last have no weight and add exactly
            # nothing.
            for step in tl.range(1, split - begin, 4, num_stages=1):
                at, left = part + begin + step, split - begin - step
                top_1, total_1, acc_1 = _load_part(PART, TOPS, at, live, dv, DV)
                top_2, total_2, acc_2 = _load_part(PART, TOPS, at + 1, live & (left > 1), dv, DV)
                top_3, total_3, acc_3 = _load_part(PART, TOPS, at + 2, live & (left > 2), dv, DV)
                top_4, total_4, acc_4 = _load_part(PART, TOPS, at + 3, live & (left > 3), dv, DV)
                old_top, old_total, old_acc = _fold(old_top, old_total, old_acc, top_1, total_1, acc_1)
                old_top, old_total, old_acc = _fold(old_top, old_total, old_acc, top_2, total_2, acc_2)
                old_top, old_total, old_acc = _fold(old_top, old_total, old_acc, top_3, total_3, acc_3)
                old_top, old_total, old_acc = _fold(old_top, old_total, old_acc, top_4, total_4, acc_4)
        top, total, acc = _fold(old_top, old_total, old_acc, top, total, acc)
    acc = _finish(top, total, acc, SINKS, q_of, live, HAS_SINKS)
    out = OUT + (token * (HEADS * GROUP) + q_of)[:, None] * DV + dv
    tl.store(out, acc.to(OUT.dtype.element_ty), live[:, None] & (dv < DV))


@triton.jit(do_not_specialize=["blocks"])
def _attend_chain_kernel(
    Q, KEYS, VALUES, LENGTH, START, TABLE, SINKS, OUT, q_token, q_head, cache_k, cache_v, scale, blocks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, LARGEST: tl.constexpr, WIDEN: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of the queries of a row whose new tokens are a chain, and are in the cache."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tile = tl.num_programs(2) - 1 - tl.program_id(2)  # the last tiles see most, so they start first
    n, offset = tl.load(LENGTH + row).to(tl.int32), tl.load(START + row)
    count = (tl.load(START + row + 1) - offset).to(tl.int32)
    if FOLLOW:
        tl.extra.cuda.gdc_wait()
    if tile * BLOCK_M >= count * GROUP:
        return
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    node, q_of = m // GROUP, head * GROUP + m % GROUP
    live = node < count
    dk, dv, j = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV), tl.arange(0, TILE)
    token = offset + node
    q = tl.load(Q + token[:, None] * q_token + q_of[:, None] * q_head + dk, live[:, None] & (dk < DK), 0.0)
    position = n + node
    end = n + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1, count)  # end of the last position seen
    low = _first_tile(n + tile * BLOCK_M // GROUP, WINDOW)
    top, total, acc = _empty_softmax(BLOCK_M, BLOCK_DV)
    # Sums are in the order of `_attend_nodes_kernel`: by tiles within a split, then by splits.
    while low < end:
        high = tl.minimum(_split_end(low), end)
        split_top, split_total, split_acc = _empty_softmax(BLOCK_M, BLOCK_DV)
        for start in range(low, high, TILE):
            s = start + j
            k_at = cached_at(KEYS, TABLE + row * blocks, s, s < end, blocks, cache_k, head, DK, PAGE)
            v_at = cached_at(VALUES, TABLE + row * blocks, s, s < end, blocks, cache_v, head, DV, PAGE)
            k = tl.load(k_at[None, :] + dk[:, None], (s < end)[None, :] & (dk[:, None] < DK), 0.0)
            v = tl.load(v_at[:, None] + dv, (s < end)[:, None] & (dv < DV), 0.0)
            k, v = from_cache(k, q, LARGEST, WIDEN), from_cache(v, q, LARGEST, WIDEN)
            visible = live[:, None] & (s[None, :] <= position[:, None])
            if WINDOW > 0:
                visible = visible & (position[:, None] - s[None, :] < WINDOW)
            split_top, split_total, split_acc = _update_softmax(
                q, k, v, visible, split_top, split_total, split_acc, scale, SOFTCAP
            )  # fmt: skip
        top, total, acc = _fold(top, total, acc, split_top, split_total, split_acc)
        low = high
    acc = _finish(top, total, acc, SINKS, q_of, live, HAS_SINKS)
    out = OUT + (token * (HEADS * GROUP) + q_of)[:, None] * DV + dv
    tl.store(out, acc.to(OUT.dtype.element_ty), live[:, None] & (dv < DV))


def _block_m(queries: int, wide: bool) -> int:
    """Return the number of queries per program, given the number of queries that share keys."""
    return 16 if wide else min(max(triton.next_power_of_2(queries), 16), MAX_QUERIES)


def _parts(positions: int) -> int:
    """Return the number of splits of this number of positions."""
    near = min(positions, attention_inputs.NEAR)
    short = triton.cdiv(near, attention_inputs.NEAR_SPLIT)
    return short + triton.cdiv(positions - near, attention_inputs.FAR_SPLIT)


def ordered_attention(inputs: AttentionInputs) -> Tensor:
    """Store and attend as `redrafter.attention.invariant_attention.invariant_attention_reference` does."""
    assert not inputs.first, "a model's layers attend from the first token on"
    assert not inputs.sees_later, "a model's tokens see none after them"
    query, keys, values, sinks, of = inputs.query, inputs.keys, inputs.values, inputs.sinks, inputs.rows
    (rows, all_nodes, nodes, chunks), (heads, group) = of.sizes, inputs.heads
    blocks, dv = (of.table.shape[0] - 1) // rows, inputs.value.shape[2]
    wide = query.element_size() > 2 or max(query.shape[2], dv) > 128
    out = inputs.new_output()
    how = attending_sizes(inputs) | dict(num_warps=4, num_stages=2, enable_fp_fusion=False)
    new = inputs.key, inputs.value
    of_new = *inputs.key.stride()[:2], *inputs.value.stride()[:2]
    of_query, of_cache = query.stride()[:2], (keys.stride(0), values.stride(0))

    block_m = _block_m(nodes * group, wide)
    tiles, parts = triton.cdiv(nodes * group, block_m), _parts(blocks * BLOCK_SIZE)
    # Splits in separate programs fill a device with few rows; with many, their results only cost memory.
    folded = 2 * rows * heads * tiles > TARGET_PROGRAMS or out.numel() * parts * 4 > MAX_PART_BYTES
    programs, parts = (1, 2) if folded else (parts, parts)
    part = query.new_empty(out.numel() * parts, dtype=torch.float32)
    tops = query.new_empty(out.numel() // dv * parts * 2, dtype=torch.float32)
    _attend_committed_kernel[(rows, heads * tiles, programs)](
        query, *new, keys, values, of.length, of.starts, of.depth, of.table, part, tops,
        *of_query, *of_new, *of_cache, inputs.scale, nodes, all_nodes - nodes, blocks, parts, tiles,
        FOLDED=folded, BLOCK_M=block_m, WIDE=max(keys.numel(), values.numel()) >= 1 << 31,
        **how | dict(num_stages=3 if block_m == 32 or (block_m == 16 and not folded and not wide) else 2),
    )  # fmt: skip
    block_m = _block_m(group, wide)
    # One more row than there are: its programs clear the padding.
    _attend_nodes_kernel[(rows + 1, nodes, heads * triton.cdiv(group, block_m))](
        query, keys, values, of.length, of.starts, of.depth, of.ancestors, of.table, sinks, out, part, tops,
        *of_query, *of_cache, inputs.scale, 0 if chunks else query.shape[0], nodes, all_nodes - nodes, blocks, parts,
        BLOCK_N=max(triton.next_power_of_2(all_nodes), 16), HAS_SINKS=sinks is not None, FOLDED=folded,
        BLOCK_M=block_m, **how | dict(num_warps=2 if folded and not wide else 4, num_stages=1),
    )  # fmt: skip
    if chunks:
        # Without trees, the chunks may have more tokens than their buffers. The padding is one more chunk.
        most = max(chunks * TOKENS_PER_CHUNK, query.shape[0] - rows * nodes) + TOKEN_MULTIPLE
        blocks, block_m = (of.chunk_table.shape[0] - 1) // (chunks + 1), _block_m(MAX_QUERIES, wide)
        in_chunks = of.chunk_lengths, of.chunk_starts, of.chunk_table
        _store_chain_kernel[(chunks + 1, heads, triton.cdiv(most, attention_inputs.TILE))](
            *new, keys, values, *in_chunks, *of_new, *of_cache, blocks, num_warps=4, **storing_sizes(inputs)
        )
        _attend_chain_kernel[(chunks + 1, heads, triton.cdiv(most * group, block_m))](
            query, keys, values, *in_chunks, sinks, out, *of_query, *of_cache, inputs.scale, blocks,
            HAS_SINKS=sinks is not None, BLOCK_M=block_m, **how,
        )  # fmt: skip
    return out
