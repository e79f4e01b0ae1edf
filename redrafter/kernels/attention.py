"""Tree attention on a GPU: native to GQA, split along the committed tokens, reading only the used part of the cache.

A program handles one row, one key head, one tile of that head's queries (all nodes of all query heads that share the
key head) and one split of the committed tokens. The last split handles the tree: it attends to the new nodes' keys and
values directly and stores them in the cache. A second kernel merges the splits by log-sum-exp (flash-decoding; Dao et
al. 2023). Rows may have unequal numbers of nodes: programs of tiles that a row does not have exit at once.

Chunks of prompts that are read with the trees are rows of a second launch, in which every token attends to all before
it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.attention_inputs import TOKEN_MULTIPLE, TOKENS_PER_CHUNK, AttentionInputs
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.kernels.cache_tiles import attending_sizes, cached_at, from_cache, is_lost, round_trip, store_new

TARGET_PROGRAMS = 264  # programs to launch: about two per multiprocessor of a large GPU
SHORT_CONTEXT_TOKENS = 2048  # up to this length, merging many splits costs more than it saves
LONG_CONTEXT_TOKENS = 8192  # from this length on, splits are added
MAX_SPLITS = 256
MAX_MERGED_NUMBERS = 1 << 15  # splits times a head's width that one program merges without registers in memory
MAX_SPLIT_TOKENS = 8192  # of a row in a batch; one program would take as long as all others together
MIN_SPLIT_TOKENS = 512  # of a row in a batch with longer ones
MAX_PART_NUMBERS = 1 << 26  # float32 numbers in the partial results of all splits: 256 MiB
LOG2E = tl.constexpr(1.4426950408889634)
NODE_STAGES = tl.constexpr(1)  # pipelined tiles of nodes; more would take shared memory from the committed tokens
STORED = tl.constexpr(16)  # new tokens that a program stores at once


@triton.jit
def _scores(q, k, scale, SOFTCAP: tl.constexpr):
    """Return products of queries and keys `[M, S]`, or capped scores; `_unit` returns their unit."""
    x = tl.dot(q, k, input_precision="ieee")
    if SOFTCAP > 0:
        x = SOFTCAP * (2 * tl.sigmoid(2 * scale / SOFTCAP * x) - 1)  # tanh
    return x


@triton.jit
def _unit(scale, SOFTCAP: tl.constexpr):
    """Return the factor that turns `_scores` into logarithms of weights to the base 2."""
    return LOG2E if SOFTCAP > 0 else scale * LOG2E


@triton.jit
def _update_softmax(scores, unit, v, top, total, acc):
    """Add one tile of keys to an online softmax."""
    new_top = tl.maximum(top, tl.max(scores, 1) * unit)
    # A tile without any visible key must not change the state, and -inf - -inf is NaN.
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * unit - anchor[:, None])
    shrink = tl.exp2(top - anchor)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_top, total, acc


@triton.jit
def _is_near(position, other, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return whether a token may see another one by position: within a window, and within its own chunk."""
    near = position - other < WINDOW if WINDOW > 0 else position == position
    if CHUNK > 0:
        near = near & (position // CHUNK == other // CHUNK)
    return near


@triton.jit
def blocks_of_tile(TABLE, start, end, BLOCK_S: tl.constexpr, PAGE: tl.constexpr):
    """Return the block of each token of a tile, 0 for those from `end` on.

    The table is read block by block. Read as a tile, it would be copied asynchronously like keys and values; copies
    complete in order, so waiting for the last blocks would mean waiting for all pending keys and values.
    """
    within = tl.arange(0, BLOCK_S) // PAGE
    block = tl.zeros([BLOCK_S], tl.int32)
    for i in tl.static_range(BLOCK_S // PAGE):
        first = start + i * PAGE
        block = tl.where(within == i, tl.load(TABLE + first // PAGE, first < end, 0), block)
    return block


@triton.jit
def _attend_committed(
    q, block, start, high, n, depth, unit, top, total, acc, KEYS, VALUES, cache_k, cache_v, scale,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, LARGEST: tl.constexpr,
    WIDEN: tl.constexpr, WIDE: tl.constexpr, FIRST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend to one tile of committed tokens of one head; where all are seen, only the last tile is masked."""
    dk, dv = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV)
    s = start + tl.arange(0, BLOCK_S)
    slot = block * PAGE + s % PAGE
    if WIDE:
        # Multiplied by the stride below, the offset would overflow 32 bits.
        slot = slot.to(tl.int64)
    k_at, v_at = KEYS + (slot * cache_k + dk[:, None]), VALUES + (slot[:, None] * cache_v + dv)
    if MASKED:
        inside = s < high
        k = tl.load(k_at, inside & (dk[:, None] < DK), 0.0)
        v = tl.load(v_at, inside[:, None] & (dv < DV), 0.0)
        visible = (inside & (s >= FIRST))[None, :]
        if WINDOW > 0 or CHUNK > 0:
            visible = visible & _is_near(n + depth[:, None], s[None, :], WINDOW, CHUNK)
        # Masked after the product: a masked load gives zeros, which would count as keys of score 0.
        x = _scores(q, from_cache(k, q, LARGEST, WIDEN), scale, SOFTCAP)
        x = tl.where(visible, x, float("-inf"))
    else:
        k = tl.load(k_at, dk[:, None] < DK, 0.0)
        v = tl.load(v_at, dv < DV, 0.0)
        x = _scores(q, from_cache(k, q, LARGEST, WIDEN), scale, SOFTCAP)
    return _update_softmax(x, unit, from_cache(v, q, LARGEST, WIDEN), top, total, acc)


@triton.jit(do_not_specialize=["nodes", "cached", "blocks", "splits", "tiles", "least"])
def _attend_kernel(
    Q, K, V, KEYS, VALUES, LENGTH, START, DEPTH, ANCESTORS, TABLE, SINKS, OUT, PART, TOPS,
    q_token, q_head, k_token, k_head, v_token, v_head, cache_k, cache_v,
    scale, nodes, cached, blocks, splits, tiles, least,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, SPLIT: tl.constexpr,
    HAS_SINKS: tl.constexpr, CACHED: tl.constexpr, CHAIN: tl.constexpr, LARGEST: tl.constexpr, WIDEN: tl.constexpr,
    WIDE: tl.constexpr, FOLLOW: tl.constexpr, FIRST: tl.constexpr, LATER: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of queries to one split of the committed tokens, or to the tree.

    Without splits (`SPLIT` is false), the only program of a tile does both and writes the output. The new nodes of a
    row are tokens `START[row]` to `START[row + 1] - 1`. If they are a chain (`CHAIN`), each has all earlier ones as
    ancestors, and neither `DEPTH` nor `ANCESTORS` is read; otherwise these have entries for `nodes` new nodes of each
    row, and `DEPTH` is read only with a window or chunks. A split has `least` committed tokens, or the rest of the row.
    No token sees committed tokens before `FIRST`, nor, without `LATER`, nodes after its own. `WIDE` is set if a layer's
    cache has too many numbers for 32-bit offsets.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) // tiles
    tile = tl.program_id(1) % tiles
    split = tl.program_id(2)
    n, offset = tl.load(LENGTH + row).to(tl.int32), tl.load(START + row)
    count = (tl.load(START + row + 1) - offset).to(tl.int32)
    # Lengths and starts were written before the previous kernel, which may still be writing queries, keys and values.
    if FOLLOW:
        tl.extra.cuda.gdc_wait()
    if tile * BLOCK_M >= count * GROUP:
        return

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    node, q_of = m // GROUP, head * GROUP + m % GROUP
    live = node < count
    dk, dv = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV)
    token, index = offset + node, row * nodes + node
    all_nodes = cached + nodes
    out = token * (HEADS * GROUP) + q_of

    # The committed tokens of this split. If there are several splits, the last one has none.
    first = 0
    # Tiles that no node sees are skipped, rounded down to whole tiles.
    if WINDOW > 0:
        first = tl.maximum(n - WINDOW + 1, 0) // BLOCK_S * BLOCK_S
    if CHUNK > 0:
        first = tl.maximum(first, n // CHUNK * CHUNK // BLOCK_S * BLOCK_S)
    share = tl.cdiv(tl.cdiv(n - first, tl.maximum(splits - 1, 1)), BLOCK_S) * BLOCK_S
    share = tl.maximum(share, least)
    low = first + split * share
    high = tl.minimum(low + share, n)
    whole = low + tl.maximum(high - low, 0) // BLOCK_S * BLOCK_S
    # With a window, every tile may be partly hidden, so all of them are masked.
    if WINDOW > 0 or CHUNK > 0 or FIRST > 0:
        whole = low
    if (split < splits - 1) & (low >= n):
        # A total of 0 makes the merge skip this split, whose part is never written.
        tl.store(TOPS + (out * splits + split) * 2, float("-inf"), live)
        tl.store(TOPS + (out * splits + split) * 2 + 1, 0.0, live)
        return

    q = tl.load(Q + token[:, None] * q_token + q_of[:, None] * q_head + dk, live[:, None] & (dk < DK), 0.0)
    depth = node
    if not CHAIN and (WINDOW > 0 or CHUNK > 0):
        depth = tl.load(DEPTH + row * all_nodes + cached + node, live, 0).to(tl.int32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    unit = _unit(scale, SOFTCAP)
    keys, values = KEYS + head * DK, VALUES + head * DV  # start of the head
    TABLE += row * blocks

    # The blocks of a tile are read while the previous tile is attended to.
    block = blocks_of_tile(TABLE, low, high, BLOCK_S, PAGE)
    for start in range(low, whole, BLOCK_S):
        next_block = blocks_of_tile(TABLE, start + BLOCK_S, high, BLOCK_S, PAGE)
        top, total, acc = _attend_committed(
            q, block, start, high, n, depth, unit, top, total, acc, keys, values, cache_k, cache_v, scale,
            DK, DV, BLOCK_DK, BLOCK_DV, BLOCK_S, PAGE, WINDOW, CHUNK, SOFTCAP, LARGEST, WIDEN, WIDE, FIRST, False,
        )  # fmt: skip
        block = next_block
    for start in range(whole, high, BLOCK_S):
        next_block = blocks_of_tile(TABLE, start + BLOCK_S, high, BLOCK_S, PAGE)
        top, total, acc = _attend_committed(
            q, block, start, high, n, depth, unit, top, total, acc, keys, values, cache_k, cache_v, scale,
            DK, DV, BLOCK_DK, BLOCK_DV, BLOCK_S, PAGE, WINDOW, CHUNK, SOFTCAP, LARGEST, WIDEN, WIDE, FIRST, True,
        )  # fmt: skip
        block = next_block

    # The tree: first the nodes of earlier forwards, from the cache; then the new ones, which are stored.
    if split == splits - 1:
        end = tl.minimum(count, tl.cdiv((tile + 1) * BLOCK_M, GROUP))  # of the tile's own nodes
        # Each tile stores the nodes of its own queries only, so no two programs write the same slot.
        for start in range(tl.cdiv(tile * BLOCK_M, GROUP), end, STORED):
            j = start + tl.arange(0, STORED)
            store_new(
                K, V, KEYS, VALUES, TABLE, offset + j, n + cached + j, j < end, k_token, k_head, v_token, v_head,
                cache_k, cache_v, blocks, head, DK, DV, BLOCK_DK, BLOCK_DV, PAGE, LARGEST,
            )  # fmt: skip
        if CACHED:
            for start in tl.range(0, cached, BLOCK_S, num_stages=NODE_STAGES):
                j = start + tl.arange(0, BLOCK_S)
                at = n + j
                held = (j < cached) & (at // PAGE < blocks)
                k_at = cached_at(KEYS, TABLE, at, held, blocks, cache_k, head, DK, PAGE)
                v_at = cached_at(VALUES, TABLE, at, held, blocks, cache_v, head, DV, PAGE)
                k = tl.load(k_at + dk[:, None], held & (dk[:, None] < DK), 0.0)
                v = tl.load(v_at[:, None] + dv, held[:, None] & (dv < DV), 0.0)
                k, v = from_cache(k, q, LARGEST, WIDEN), from_cache(v, q, LARGEST, WIDEN)
                visible = tl.load(ANCESTORS + index[:, None] * all_nodes + j, live[:, None] & held, 0) != 0
                if WINDOW > 0 or CHUNK > 0:
                    above = tl.load(DEPTH + row * all_nodes + j, held, 0).to(tl.int32)
                    visible = visible & _is_near(n + depth[:, None], n + above[None, :], WINDOW, CHUNK)
                x = tl.where(visible, _scores(q, k, scale, SOFTCAP), float("-inf"))
                top, total, acc = _update_softmax(x, unit, v, top, total, acc)
        if LATER:  # else no node of the tile sees the nodes after it
            end = count
        for start in tl.range(0, end, BLOCK_S, num_stages=NODE_STAGES):
            j = start + tl.arange(0, BLOCK_S)
            held = j < count
            other = offset + j
            k = tl.load(K + other * k_token + head * k_head + dk[:, None], held & (dk[:, None] < DK), 0.0)
            v = tl.load(V + other[:, None] * v_token + head * v_head + dv, held[:, None] & (dv < DV), 0.0)
            # Rounded as later forwards will read them, or a token's logits would depend on which tokens share its
            # forward.
            k, v = round_trip(k, KEYS, q, LARGEST), round_trip(v, VALUES, q, LARGEST)
            lost = is_lost(v, LARGEST)
            # A value that is not finite reaches those that see it through its score alone, as 0 * NaN is NaN.
            v = tl.where(lost[:, None], 0.0, v).to(q.dtype)
            if CHAIN:
                visible = live[:, None] & (node[:, None] >= j[None, :])
                visible = visible & _is_near(n + node[:, None], n + j[None, :], WINDOW, CHUNK)
            else:
                visible = tl.load(ANCESTORS + index[:, None] * all_nodes + cached + j, live[:, None] & held, 0) != 0
                if WINDOW > 0 or CHUNK > 0:
                    level = tl.load(DEPTH + row * all_nodes + cached + j, held, 0).to(tl.int32)
                    visible = visible & _is_near(n + depth[:, None], n + level[None, :], WINDOW, CHUNK)
            x = tl.where(lost[None, :], float("nan"), _scores(q, k, scale, SOFTCAP))
            x = tl.where(visible, x, float("-inf"))
            top, total, acc = _update_softmax(x, unit, v, top, total, acc)

    # Partial results stay in float32 and unnormalised: the merge needs the sums of the weights.
    if SPLIT:
        index = out * splits + split
        tl.store(TOPS + index * 2, top, live)
        tl.store(TOPS + index * 2 + 1, total, live)
        attended = live & (total != 0)  # also NaN
        tl.store(PART + index[:, None] * DV + dv, acc, attended[:, None] & (dv < DV))
    else:
        if HAS_SINKS:
            # A sink adds to the sum of the weights but has no value.
            sink = tl.load(SINKS + q_of, live, 0.0).to(tl.float32) * LOG2E
            new_top = tl.maximum(top, sink)
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.exp2(sink - new_top)
            acc = acc * shrink[:, None]
        # Padding attends to nothing, and 0 / 0 would write NaN.
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(OUT + out[:, None] * DV + dv, acc.to(OUT.dtype.element_ty), live[:, None] & (dv < DV))


@triton.jit(do_not_specialize=["splits"])
def _merge_splits_kernel(
    PART, TOPS, SINKS, OUT, START, END, splits,
    QUERY_HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of one query head of one token, by log-sum-exp; 0 for tokens from `END` on.

    Tokens before `START` are not written.
    """
    out = tl.program_id(0).to(tl.int64)
    begin, count = tl.load(START) * QUERY_HEADS, tl.load(END) * QUERY_HEADS
    s, dv = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_DV)
    index = out * splits + s
    # It only waits, without an early trigger: merges launched earlier would take space from the splits (docs/log.md).
    if FOLLOW:
        tl.extra.cuda.gdc_wait()
    if out < begin:
        return
    live = (s < splits) & (out < count)
    top = tl.load(TOPS + index * 2, live, float("-inf"))
    total = tl.load(TOPS + index * 2 + 1, live, 0.0)
    best = tl.max(top, 0)
    if HAS_SINKS:
        sink = tl.load(SINKS + out % QUERY_HEADS).to(tl.float32) * LOG2E
        best = tl.maximum(best, sink)
    # A split without visible keys has top -inf, and -inf - -inf is NaN.
    weight = tl.where(total != 0, tl.exp2(tl.where(total != 0, top - best, 0.0)), 0.0)
    part = tl.load(PART + index[:, None] * DV + dv, (total != 0)[:, None] & (dv < DV), 0.0)
    whole = tl.sum(total * weight, 0)
    if HAS_SINKS:
        whole += tl.exp2(sink - best)
    result = tl.sum(part * weight[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    tl.store(OUT + out * DV + dv, result.to(OUT.dtype.element_ty), dv < DV)


class _Tiling(NamedTuple):
    """Describes how the attention of some rows is divided into programs.

    Attributes:
        queries: Queries per tile.
        keys: Keys per tile.
        splits: Splits of a row; the last one is the tree.
        stages: Pipelined tiles of keys and values.
        warps: Warps of a program; 8 with one stage only: Triton 3.6 has pipelined such loops with a race, in 1 of 3
            rows of a prompt.
        least: Minimum number of tokens of a split.
    """

    queries: int
    keys: int
    splits: int
    stages: int
    warps: int = 4
    least: int = 0


def choose_tiling(groups: int, queries: int, blocks: int, width: int, half: bool, fp8: bool) -> _Tiling:
    """Choose the tiling by size, as measured on an H200 (docs/benchmarks.md, Attention).

    `groups` is the number of rows times key heads, each with `queries` of its nodes and query heads. The width of the
    table, `blocks`, bounds a row's length; `width` is the larger of the head widths of queries and values.
    """
    widest, programs = max(triton.next_power_of_2(queries), 16), TARGET_PROGRAMS
    short, long = blocks * BLOCK_SIZE <= SHORT_CONTEXT_TOKENS, blocks * BLOCK_SIZE > LONG_CONTEXT_TOKENS
    tile, keys, stages, warps = min(widest, 64), 64, 3, 4
    if not half and width > 128:
        tile, keys, stages, warps = 16, 16, 1, 8  # larger tiles or fewer warps spill registers
    elif not half or width > 128:
        tile, keys, stages = min(widest, 16 if width > (256 if half else 64) else 32), 32, 1
    elif widest == 128 and 2 * groups > TARGET_PROGRAMS:
        tile, keys = 128, 32  # each tile that is read and widened serves more queries
    elif widest >= 64 and short:
        programs //= 2
    elif widest == 16 and short:
        keys = 32
    elif widest == 16 and fp8 and long:
        warps, programs = 2, 2 * programs
    # A merge holds all splits of a head in registers.
    most = min(MAX_MERGED_NUMBERS // triton.next_power_of_2(width), MAX_SPLITS)
    splits = min(max(programs // (groups * triton.cdiv(queries, tile)), 1), most)
    return _Tiling(tile, keys, splits, stages, warps)


def _for_long_rows(tiling: _Tiling, blocks: int, numbers: int) -> _Tiling:
    """Return a tiling with splits that suit the longest possible row.

    The splits of `choose_tiling` keep a device busy if all rows have equal lengths. A row much longer than the others
    would be left to a few programs. `numbers` is the size of one split's results, for all tokens and query heads.
    """
    wanted = min(1 + triton.cdiv(blocks * BLOCK_SIZE, MAX_SPLIT_TOKENS), MAX_PART_NUMBERS // numbers)
    if blocks * BLOCK_SIZE <= LONG_CONTEXT_TOKENS or wanted <= max(tiling.splits, 2):
        return tiling
    return tiling._replace(splits=wanted, least=MIN_SPLIT_TOKENS)


def tree_attention(inputs: AttentionInputs) -> Tensor:
    """Store and attend as `redrafter.attention.tree_attention.gathered_attention` does."""
    query, key, value, keys, values, of = (
        inputs.query, inputs.key, inputs.value, inputs.keys, inputs.values, inputs.rows,
    )  # fmt: skip
    (rows, all_nodes, nodes, chunks), (heads, group) = of.sizes, inputs.heads
    (tokens, query_heads, dk), dv = query.shape, value.shape[2]
    out, sizes = inputs.new_output(), attending_sizes(inputs)
    merging = {name: sizes[name] for name in ("DV", "BLOCK_DV", "FOLLOW", "launch_pdl")}

    def attend(
        length: Tensor, starts: Tensor, table: Tensor, rows: int, nodes: int, cached: int, tiling: _Tiling,
        chain: bool = False,
    ) -> None:  # fmt: skip
        """Launch the attention of rows with at most `nodes` new nodes, and `cached` ones that are in the cache."""
        splits = tiling.splits
        tiles, blocks = triton.cdiv(nodes * group, tiling.queries), (table.shape[0] - 1) // rows
        # Unused arguments still need a pointer, and `out` costs no allocation.
        part = out if splits == 1 else query.new_empty(tokens, query_heads, splits, dv, dtype=torch.float32)
        tops = out if splits == 1 else query.new_empty(tokens, query_heads, splits, 2, dtype=torch.float32)
        _attend_kernel[(rows, heads * tiles, splits)](
            query, key, value, keys, values, length, starts, of.depth, of.ancestors, table, inputs.sinks, out, part,
            tops, *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], keys.stride(0), values.stride(0),
            inputs.scale, nodes, cached, blocks, splits, tiles, tiling.least,
            BLOCK_M=tiling.queries, BLOCK_S=tiling.keys, CHUNK=inputs.chunk_size, SPLIT=splits > 1,
            HAS_SINKS=inputs.sinks is not None, CACHED=cached > 0, CHAIN=chain,
            WIDE=max(len(x) * x.stride(0) for x in (keys, values)) >= 1 << 31, FIRST=inputs.first,
            LATER=inputs.sees_later, num_warps=tiling.warps, num_stages=tiling.stages, **sizes,
        )  # fmt: skip
        if splits > 1:
            block_splits, width = triton.next_power_of_2(splits), sizes["BLOCK_DV"]
            warps = min(max(block_splits * width // 4096, 1 if width <= 64 else 2), 16)  # so that it fits in registers
            _merge_splits_kernel[(tokens * query_heads,)](
                part, tops, inputs.sinks, out, starts, starts[rows:], splits, QUERY_HEADS=query_heads,
                BLOCK_SPLITS=block_splits, HAS_SINKS=inputs.sinks is not None, num_warps=warps, **merging,
            )  # fmt: skip

    size = max(dk, dv), query.element_size() == 2, keys.element_size() == 1
    # Most rows of a ragged tree have fewer nodes than the largest one, so tiles are sized by the mean.
    mean = max(triton.cdiv(tokens - chunks * TOKENS_PER_CHUNK, rows), 1)
    blocks = (of.table.shape[0] - 1) // rows
    tiling = choose_tiling(rows * heads, min(mean, nodes) * group, blocks, *size)
    if rows > 1:
        tiling = _for_long_rows(tiling, blocks, out.numel())
    attend(of.length, of.starts, of.table, rows, nodes, all_nodes - nodes, tiling)
    if chunks:  # padding is one more chunk
        most = chunks * TOKENS_PER_CHUNK + TOKEN_MULTIPLE
        blocks = (of.chunk_table.shape[0] - 1) // (chunks + 1)
        # A chunk's queries fill the device already, so splits would only add a merge.
        tiling = choose_tiling(heads, most * group, blocks, *size)._replace(splits=1)
        tiling = _for_long_rows(tiling, blocks, out.numel())
        attend(of.chunk_lengths, of.chunk_starts, of.chunk_table, chunks + 1, most, 0, tiling, chain=True)
    elif tokens > rows * nodes and tiling.splits == 1:
        # The kernel writes no padding tokens, whose garbage could be NaN.
        out[rows * nodes :].zero_()
    return out
