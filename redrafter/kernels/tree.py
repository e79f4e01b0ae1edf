"""The search of a token tree: the best continuations of all beams, the best nodes of all rows, and all ancestors.

Continuations are found by a pass over chunks of the scores, followed by one over the best of each chunk; the best nodes
by comparing each score with all others; ancestors by walking up from each node.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.attention import LOG2E
from redrafter.kernels.block_size import CHUNK


@triton.jit
def _load_scores(SCORES, at, vocab):
    """Load scores as float32: those past the vocabulary as `-inf`, NaN and infinity as a number below real scores."""
    x = tl.load(SCORES + at, at < vocab, float("-inf")).to(tl.float32)
    return tl.where(x < float("inf"), x, -3e38)  # NaN keeps its own id, so that no id is chosen twice


@triton.jit
def _top_of_chunk_kernel(
    SCORES, VALUES, IDS, TOPS, vocab, chunks, first, WIDE: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr
):
    """Find the largest scores of one chunk of one beam, best first, with their ids, and its part of the log-sum-exp.

    There are `vocab` scores of a beam, which begin at chunk `first` of all `chunks`.

    Each turn takes the first group of ids whose largest score is the best, and reads that group again to find the id
    and the group's largest score after it. So all scores are compared once, however many are found.
    """
    beam, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    SCORES += beam * vocab
    x = _load_scores(SCORES, chunk * CHUNK + tl.arange(0, CHUNK), vocab)
    group, tops = tl.arange(0, CHUNK // GROUP), tl.max(tl.reshape(x, [CHUNK // GROUP, GROUP]), 1)
    top = tl.max(tops, 0)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    index = beam * chunks + first + chunk
    tl.store(TOPS + index * 2, anchor)
    # Not a multiply-add, which would round the top's exponent, 0. Faster than tl.exp, which keeps denormal results.
    tl.store(TOPS + index * 2 + 1, tl.sum(tl.exp2((x - anchor) * LOG2E), 0))
    last, found = float("inf"), 0
    for rank in range(WIDE):
        best = tl.max(tops, 0)
        chosen = tl.min(tl.where(tops == best, group, CHUNK), 0)
        at = chunk * CHUNK + chosen * GROUP + tl.arange(0, GROUP)
        y = _load_scores(SCORES, at, vocab)
        y = tl.where((y < last) | ((y == last) & (at > found)), y, float("-inf"))  # without those found before
        last, found = best, tl.min(tl.where(y == best, at, vocab), 0)
        tl.store(VALUES + index * WIDE + rank, best)
        tl.store(IDS + index * WIDE + rank, first * CHUNK + found)
        tops = tl.where(group == chosen, tl.max(tl.where(at == found, float("-inf"), y), 0), tops)


@triton.jit
def _top_of_row_kernel(
    VALUES, IDS, TOPS, TOTAL, NAMES, SCORE, SOURCE, TOKEN, beams, chunks,
    WIDE: tl.constexpr, BLOCK_BEAMS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, BLOCK_WIDE: tl.constexpr,
    NAMED: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Find the best pairs of source beam and token of one row, by cumulative log-probability.

    If all beams have the same scores (`SHARED`), there are lists of one beam.

    The chunks' sorted lists are merged: each turn takes the best of their first entries and advances that list. So a
    program holds one number per list, however long the lists are.
    """
    row = tl.program_id(0).to(tl.int64)
    beam, chunk, heads = tl.arange(0, BLOCK_BEAMS), tl.arange(0, BLOCK_CHUNKS), tl.arange(0, BLOCK_BEAMS * BLOCK_CHUNKS)
    live = beam < beams
    index = (row + 0 * beam if SHARED else row * beams + beam)[:, None] * chunks + chunk
    in_chunks = live[:, None] & (chunk < chunks)
    tops = tl.load(TOPS + index * 2, in_chunks, float("-inf"))
    sums = tl.load(TOPS + index * 2 + 1, in_chunks, 0.0)
    top = tl.max(tops, 1)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    whole = anchor + tl.log(tl.sum(sums * tl.exp(tops - anchor[:, None]), 1))
    total = tl.load(TOTAL + row * beams + beam, live, 0.0)
    # In this order rounding cannot make a continuation likelier than its beam, which pruning the tree relies on.
    x = total[:, None] + (tl.load(VALUES + index * WIDE, in_chunks, float("-inf")) - whole[:, None])
    x = tl.reshape(tl.where(in_chunks, x, float("-inf")), [BLOCK_BEAMS * BLOCK_CHUNKS])
    turns = tl.arange(0, BLOCK_WIDE)
    score, entry = tl.zeros([BLOCK_WIDE], tl.float32), tl.zeros([BLOCK_WIDE], tl.int64)
    chosen = tl.full([BLOCK_WIDE], -1, tl.int32)
    for turn in range(WIDE):
        best, where = tl.max(x, 0, return_indices=True)
        taken = tl.sum((chosen == where).to(tl.int32), 0)  # number of entries taken from this list before
        source = where // BLOCK_CHUNKS
        at = ((row if SHARED else row * beams + source) * chunks + where % BLOCK_CHUNKS) * WIDE + taken
        value = tl.load(VALUES + at + 1, taken + 1 < WIDE, float("-inf"))
        of_source = beam == source
        value -= tl.sum(tl.where(of_source, whole, 0.0), 0)
        x = tl.where(heads == where, tl.sum(tl.where(of_source, total, 0.0), 0) + value, x)
        score, entry = tl.where(turns == turn, best, score), tl.where(turns == turn, at, entry)
        chosen = tl.where(turns == turn, where, chosen)
    out, selected = row * WIDE + turns, turns < WIDE
    token = tl.load(IDS + entry, selected, 0).to(tl.int64)
    if NAMED:
        token = tl.load(NAMES + token, selected, 0)
    tl.store(SCORE + out, score, selected)
    tl.store(SOURCE + out, (chosen // BLOCK_CHUNKS).to(tl.int64), selected)
    tl.store(TOKEN + out, token, selected)


def top_continuations(
    scores: Tensor,
    total: Tensor,
    width: int,
    ids: Tensor | None,
    *,
    first: int = 0,
    vocabulary: int | None = None,
    share: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Select the best pairs as `redrafter.tree.beam_search.top_continuations` does.

    Ranks may each score a part of the ids, of whole chunks. Their best pairs are then exchanged as a sum of
    messages with zeros in place of other ranks' pairs: one message, in which ids are floating-point numbers.

    Args:
        scores: Unnormalised log-probabilities, `[B, w, V']`, or this rank's part of them.
        total: As there.
        width: As there.
        ids: As there, of all ids.
        first: Id of the first score, a multiple of `CHUNK`.
        vocabulary: V', where the scores are a part; less than 2 ** 24.
        share: Returns the sum of a tensor over all ranks, where the scores are a part.
    """
    rows, beams, vocab = scores.shape
    shared = beams > 1 and scores.stride(1) == 0  # of a block of drafts: expanded, and read once
    scores = (scores[:, :1] if shared else scores).contiguous()
    chunks, lists = triton.cdiv(vocabulary or vocab, CHUNK), scores.shape[1]
    sizes = [rows * lists * chunks * each for each in (width, width, 2)]
    sizes.append(-sum(sizes) % 4)  # such messages need no copy by NCCL
    if share is None:
        values, tops = (scores.new_empty(size, dtype=torch.float32) for size in sizes[::2])
        found_ids = torch.empty_like(values, dtype=torch.int32)
    else:
        packed = scores.new_zeros(sum(sizes), dtype=torch.float32)
        values, found_ids, tops, _ = packed.split(sizes)
    _top_of_chunk_kernel[(rows * lists, triton.cdiv(vocab, CHUNK))](
        scores, values, found_ids, tops, vocab, chunks, first // CHUNK, WIDE=width, CHUNK=CHUNK,
        GROUP=16 // scores.element_size(), num_warps=1,  # what a thread loads at once: it needs no other thread's
    )  # fmt: skip
    if share is not None:
        values, found_ids, tops, _ = share(packed).split(sizes)
    score = scores.new_empty(rows, width, dtype=torch.float32)
    source = torch.empty_like(score, dtype=torch.long)
    token = torch.empty_like(source)
    block_beams, block_chunks = triton.next_power_of_2(beams), triton.next_power_of_2(chunks)
    _top_of_row_kernel[(rows,)](
        values, found_ids, tops, total.contiguous(), ids, score, source, token, beams, chunks,
        WIDE=width, BLOCK_BEAMS=block_beams, BLOCK_CHUNKS=block_chunks, BLOCK_WIDE=triton.next_power_of_2(width),
        NAMED=ids is not None, SHARED=shared, num_warps=min(max(block_beams * block_chunks // 512, 4), 32),
    )  # fmt: skip
    return score, source, token


@triton.jit(do_not_specialize=["nodes", "levels"])
def _ancestors_kernel(PARENTS, OUT, nodes, levels, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Mark the ancestors of a block of nodes of one row."""
    row = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = node < nodes
    other = tl.arange(0, WIDTH)
    tl.store(OUT + (row * nodes + node)[:, None] * nodes + other, 0, live[:, None] & (other < nodes))
    # A thread may mark an entry that another one clears: all clears come first.
    tl.debug_barrier()
    at = node.to(tl.int64)
    # The root is its own parent, so shallow nodes mark it again in the remaining steps.
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
    width = triton.next_power_of_2(nodes)
    _ancestors_kernel[(rows, triton.cdiv(nodes, 32))](
        parents.contiguous(), out.view(torch.uint8), nodes, max_depth, BLOCK=32, WIDTH=width, num_warps=1
    )
    return out


@triton.jit(do_not_specialize=["tokens_row", "parents_row", "depth_row", "nodes", "width", "count", "total"])
def _hold_kernel(
    TOKENS, PARENTS, DEPTH, SCORE, NEW_TOKENS, NEW_PARENTS, NEW_DEPTH, BEFORE, COUNTS, MOVED,
    tokens_row, parents_row, depth_row, nodes, width, count, total, BY_ROW: tl.constexpr, BLOCK: tl.constexpr,
    COMPARED: tl.constexpr,
):  # fmt: skip
    """Move the nodes of one row that are among the best `total` of `count` nodes to its front, and write `width`.

    These nodes are those of the row if `BY_ROW`, else those of all rows.
    """
    row, node = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    live, at = node < nodes, row * nodes + node
    score = tl.load(SCORE + at, live, 0.0)
    own = tl.where(node == 0, float("inf"), score)[:, None]  # a root is held for any score
    rank = tl.zeros([BLOCK], tl.int32)
    begin = row * nodes if BY_ROW else row * 0
    for first in range(0, count, COMPARED):
        other = first + tl.arange(0, COMPARED)
        theirs = tl.load(SCORE + begin + other, other < count, float("-inf"))
        theirs = tl.where(other % nodes == 0, float("inf"), theirs)[None, :]
        # On a tie the first one is held, and so a parent before its child.
        ahead = (theirs > own) | ((theirs == own) & (begin + other[None, :] < at[:, None]))
        rank += tl.sum((ahead & (other < count)[None, :]).to(tl.int32), 1)
    held = (live & (rank < total)).to(tl.int32)
    held_before, all_held = tl.cumsum(held, 0) - held, tl.sum(held, 0)
    moved = tl.where(held > 0, held_before, all_held + node - held_before)
    tl.store(MOVED + at, moved, live)
    tl.debug_barrier()  # a thread reads where another one moved a parent
    to, parent = row * width + moved, tl.load(PARENTS + row * parents_row + node, live, 0)
    live = live & (moved < width)
    tl.store(NEW_PARENTS + to, tl.load(MOVED + row * nodes + parent, live, 0).to(tl.int64), live)
    tl.store(NEW_TOKENS + to, tl.load(TOKENS + row * tokens_row + node, live, 0), live)
    tl.store(NEW_DEPTH + to, tl.load(DEPTH + row * depth_row + node, live, 0), live)
    tl.store(BEFORE + to, node.to(tl.int64), live)
    tl.store(COUNTS + row, all_held.to(tl.int64))


def hold_best(
    tokens: Tensor, parents: Tensor, depth: Tensor, score: Tensor, total: int, *, by_row: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Move nodes as `redrafter.tree.token_tree.hold_best` does, with the same arguments and results."""
    rows, nodes = score.shape
    score, width = score.contiguous(), total if by_row else nodes
    moved_to, counts = score.new_empty(rows, nodes, dtype=torch.int32), tokens.new_empty(rows)
    found = *tokens.new_empty(4, rows, width), counts
    block = triton.next_power_of_2(nodes)
    warps = min(max(block // 64, 4), 16)
    _hold_kernel[(rows,)](
        tokens, parents, depth, score, *found, moved_to, *(x.stride(0) for x in (tokens, parents, depth)),
        nodes, width, nodes if by_row else rows * nodes, total,
        BY_ROW=by_row, BLOCK=block, COMPARED=max(1024 * warps // block, 16), num_warps=warps,
    )  # fmt: skip
    return found
