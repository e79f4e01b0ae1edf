"""Sums of small messages over GPUs that write to each other's memory, in one launch and one way over the link.

Each rank writes its message to an inbox of every other rank, each word of it together with the number of the call, as
NCCL's LL protocol does: a word that carries the number has arrived, so that no rank waits for a signal after the data.
Each rank adds what it found in the order of ranks. `redrafter.parallel.all_reduce.collective_sum` is the reference.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 512  # words of 4 bytes per program
PARITIES = 2  # a rank sends at most one call ahead of another that still reads


@triton.jit
def _low(word, HALVES: tl.constexpr):
    """Return the float32, or the first of two bfloat16, in each word."""
    if HALVES:
        word = word << 16
    return word.to(tl.float32, bitcast=True)


@triton.jit
def _high(word):
    """Return the second of two bfloat16 in each word."""
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _add(total, part, HALVES: tl.constexpr):
    """Add in float32, and round as torch's kernels do after each addition."""
    total = total + part
    if HALVES:
        total = total.to(tl.bfloat16).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["count"])
def _peer_sum_kernel(
    X, OUT, INBOXES, CALLS, count,
    RANK: tl.constexpr, RANKS: tl.constexpr, SLOTS: tl.constexpr, HALVES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Send a part of a message to all ranks, and add theirs."""
    part = tl.program_id(0)
    call = tl.load(CALLS + part) + 1  # each program counts its own calls, which are those of its peers
    at = part * WORDS + tl.arange(0, WORDS)
    inside = at < count
    own = tl.load(X + at, inside, 0)
    line = (call.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
    box = (call & 1) * RANKS * SLOTS + at
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            inbox = tl.load(INBOXES + peer).to(tl.pointer_type(tl.int64))
            tl.store(inbox + box + RANK * SLOTS, line, inside)
    mine = tl.load(INBOXES + RANK).to(tl.pointer_type(tl.int64))
    low, high = tl.zeros([WORDS], tl.float32), tl.zeros([WORDS], tl.float32)
    for source in tl.static_range(RANKS):
        word = own
        if source != RANK:
            found = tl.load(mine + box + source * SLOTS, inside, 0, volatile=True)
            while tl.max((((found >> 32).to(tl.int32) != call) & inside).to(tl.int32), 0) > 0:
                found = tl.load(mine + box + source * SLOTS, inside, 0, volatile=True)
            word = found.to(tl.int32)
        low = _add(low, _low(word, HALVES), HALVES)
        if HALVES:
            high = _add(high, _high(word), HALVES)
    total = low.to(tl.int32, bitcast=True)
    if HALVES:  # both are bfloat16 numbers: the lower half of their bits is zero
        total = ((total >> 16) & 0xFFFF) | high.to(tl.int32, bitcast=True)
    tl.store(OUT + at, total, inside)
    tl.store(CALLS + part, call)


def inbox_words(nbytes: int, ranks: int) -> int:
    """Return the size of a rank's inbox for messages of up to `nbytes` bytes, in words of 8 bytes."""
    return PARITIES * ranks * _slots(nbytes)


def peer_sum_parts(nbytes: int) -> int:
    """Return the number of programs that sum a message of `nbytes` bytes, which count their calls."""
    return int(triton.cdiv(nbytes // 4, WORDS))


def _slots(nbytes: int) -> int:
    return peer_sum_parts(nbytes) * WORDS


def peer_sum(x: Tensor, inboxes: Tensor, calls: Tensor, rank: int, largest: int) -> Tensor:
    """Return the sum of every rank's `x`, with the same bits on all ranks. All ranks call it in the same order.

    Args:
        x: The message, bfloat16 or float32, contiguous, of a multiple of 4 bytes and at most `largest`.
        inboxes: Addresses of the ranks' inboxes, each of `inbox_words(largest, N)` int64 that were zero at first,
            `[N]` int64.
        calls: Number of calls so far of each part of a message, `[peer_sum_parts(largest)]` int32; zero at first.
        rank: Number of this rank.
        largest: Bytes of the largest message.

    Returns:
        The sum, of the shape of `x`, in the order of ranks; bfloat16 is rounded after each addition.
    """
    words, ranks = x.nbytes // 4, len(inboxes)
    out = torch.empty_like(x)
    _peer_sum_kernel[(peer_sum_parts(x.nbytes),)](
        x.view(-1).view(torch.int32), out.view(-1).view(torch.int32), inboxes, calls, words,
        RANK=rank, RANKS=ranks, SLOTS=_slots(largest), HALVES=x.dtype == torch.bfloat16, WORDS=WORDS, num_warps=4,
    )  # fmt: skip
    return out
