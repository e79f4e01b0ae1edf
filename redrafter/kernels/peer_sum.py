"""Sums of messages over GPUs that write to each other's memory, in one launch.

Two kernels write into inboxes of the other ranks, and add what they find in their own, in the order of ranks:

- `peer_sum` sends the whole message to every rank, each word together with the number of the call, as NCCL's LL
  protocol does: a word that carries the number has arrived, so that no rank waits for a signal after the data. It is
  the faster one for small messages.
- `peer_sum_by_shares` sends each rank its share of the message; each rank adds its share and sends the sum to all.
  A flag per program says that the words before it have arrived. With N ranks, a link carries 1/N of the bytes.

`redrafter.parallel.all_reduce.collective_sum` is the reference.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.launch import supports_dependent_launch

WORDS = 512  # words of 4 bytes per program
PARITIES = 2  # a rank sends at most one call ahead of another that still reads
PASSES = 2  # of a message in shares: parts of the shares, and their sums


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
def _add(total, word, HALVES: tl.constexpr):
    """Add the numbers in words in float32; bfloat16 is rounded after each addition, as by torch's kernels."""
    low = _low(total, HALVES) + _low(word, HALVES)
    if HALVES:
        low = low.to(tl.bfloat16).to(tl.float32)
        high = (_high(total) + _high(word)).to(tl.bfloat16).to(tl.float32)
        # Both are bfloat16 numbers: the lower half of their bits is zero.
        return ((low.to(tl.int32, bitcast=True) >> 16) & 0xFFFF) | high.to(tl.int32, bitcast=True)
    return low.to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["count"])
def _peer_sum_kernel(
    X, OUT, INBOXES, CALLS, count,
    RANK: tl.constexpr, RANKS: tl.constexpr, PARTS: tl.constexpr, HALVES: tl.constexpr, WORDS: tl.constexpr,
    FOLLOW: tl.constexpr,
):  # fmt: skip
    """Send a part of a message to all ranks, and add theirs.

    An inbox has room for `PARTS` programs, by parity and source.
    `FOLLOW` is set if the kernel may be launched before the previous one is done (programmatic dependent launch).
    """
    if FOLLOW:
        tl.extra.cuda.gdc_wait()
    part = tl.program_id(0)
    call = tl.load(CALLS + part) + 1  # each program counts its own calls, which are those of its peers
    at = part * WORDS + tl.arange(0, WORDS)
    inside = at < count
    own = tl.load(X + at, inside, 0)
    line = (call.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
    box = (call & 1) * RANKS * PARTS * WORDS + at
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            inbox = tl.load(INBOXES + peer).to(tl.pointer_type(tl.int64))
            tl.store(inbox + box + RANK * PARTS * WORDS, line, inside)
    mine = tl.load(INBOXES + RANK).to(tl.pointer_type(tl.int64))
    total = own
    for source in tl.static_range(RANKS):
        word = own
        if source != RANK:
            found = tl.load(mine + box + source * PARTS * WORDS, inside, 0, volatile=True)
            while tl.max((((found >> 32).to(tl.int32) != call) & inside).to(tl.int32), 0) > 0:
                found = tl.load(mine + box + source * PARTS * WORDS, inside, 0, volatile=True)
            word = found.to(tl.int32)
        total = word if source == 0 else _add(total, word, HALVES)
    tl.store(OUT + at, total, inside)
    tl.store(CALLS + part, call)


@triton.jit
def _inbox(INBOXES, rank):
    """Return the inbox of a rank for messages in shares."""
    return tl.multiple_of(tl.load(INBOXES + rank).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def _set(flags, call):
    """Set flags of all ranks to the number of the call, each by a thread, after all threads have written."""
    tl.debug_barrier()
    tl.atomic_xchg(flags, call, sem="release", scope="sys")


@triton.jit
def _wait(flags, call):
    """Wait until all ranks have set these flags to the number of the call: their messages can be read then."""
    while tl.max((tl.atomic_add(flags, 0, sem="acquire", scope="sys") != call).to(tl.int32), 0) > 0:
        pass


@triton.jit
def _peer_sum_by_shares_kernel(
    X, OUT, INBOXES, CALLS, count,
    RANK: tl.constexpr, RANKS: tl.constexpr, PARTS: tl.constexpr, HALVES: tl.constexpr, WORDS: tl.constexpr,
    FOLLOW: tl.constexpr,
):  # fmt: skip
    """Send a part of each share to its rank, add those of the own share, and send the sum to all ranks.

    An inbox has room for `PARTS` programs, by parity, pass and source; their flags follow the words.
    """
    if FOLLOW:
        tl.extra.cuda.gdc_wait()
    part, share = tl.program_id(0), tl.num_programs(0) * WORDS
    call = tl.load(CALLS + part) + 1
    at = part * WORDS + tl.arange(0, WORDS)
    first = (call & 1) * 2 * RANKS  # place of rank 0 in the first pass
    second = first + RANKS
    ranks = tl.arange(0, RANKS)
    flags = 4 * RANKS * PARTS * WORDS + part
    mine = _inbox(INBOXES, RANK)
    all_flags = tl.load(INBOXES + ranks).to(tl.pointer_type(tl.int32)) + flags
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            inside = peer * share + at < count
            words = tl.load(X + peer * share + at, inside, 0)
            tl.store(_inbox(INBOXES, peer) + (first + RANK) * PARTS * WORDS + at, words, inside)
    _set(all_flags + (first + RANK) * PARTS, call)
    inside = RANK * share + at < count
    own = tl.load(X + RANK * share + at, inside, 0)
    _wait(mine + flags + (first + ranks) * PARTS, call)
    total = own
    for source in tl.static_range(RANKS):
        words = own
        if source != RANK:
            words = tl.load(mine + (first + source) * PARTS * WORDS + at, inside, 0, volatile=True)
        total = words if source == 0 else _add(total, words, HALVES)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            tl.store(_inbox(INBOXES, peer) + (second + RANK) * PARTS * WORDS + at, total, inside)
    _set(all_flags + (second + RANK) * PARTS, call)
    tl.store(OUT + RANK * share + at, total, inside)
    _wait(mine + flags + (second + ranks) * PARTS, call)
    for source in tl.static_range(RANKS):
        if source != RANK:
            inside = source * share + at < count
            words = tl.load(mine + (second + source) * PARTS * WORDS + at, inside, 0, volatile=True)
            tl.store(OUT + source * share + at, words, inside)
    tl.store(CALLS + part, call)


def peer_sum_parts(nbytes: int) -> int:
    """Return the number of programs that sum a message of `nbytes` bytes, which count their calls."""
    return int(triton.cdiv(nbytes // 4, WORDS))


def share_parts(nbytes: int, ranks: int) -> int:
    """Return the number of programs that sum a message of `nbytes` bytes by shares, which count their calls."""
    return int(triton.cdiv(nbytes // 4, ranks * WORDS))


def inbox_bytes(nbytes: int, ranks: int) -> int:
    """Return the size of a rank's inbox of `peer_sum` for messages of up to `nbytes` bytes."""
    return 8 * PARITIES * ranks * peer_sum_parts(nbytes) * WORDS


def share_inbox_bytes(nbytes: int, ranks: int) -> int:
    """Return the size of a rank's inbox of `peer_sum_by_shares` for messages of up to `nbytes` bytes."""
    return 4 * PARITIES * PASSES * ranks * share_parts(nbytes, ranks) * (WORDS + 1)


def peer_sum(x: Tensor, inboxes: Tensor, calls: Tensor, rank: int, largest: int) -> Tensor:
    """Return the sum of every rank's `x`, with the same bits on all ranks. All ranks call it in the same order.

    Args:
        x: The message, bfloat16 or float32, contiguous, of a multiple of 4 bytes and at most `largest`.
        inboxes: Addresses of the ranks' inboxes, each of `inbox_bytes(largest, N)` bytes that were zero at first,
            `[N]` int64.
        calls: Number of calls so far of each part of a message, `[peer_sum_parts(largest)]` int32; zero at first.
        rank: Number of this rank.
        largest: Bytes of the largest message.

    Returns:
        The sum, of the shape of `x`, in the order of ranks; bfloat16 is rounded after each addition.
    """
    parts = peer_sum_parts(x.nbytes), peer_sum_parts(largest)
    return _sum(_peer_sum_kernel, parts, x, inboxes, calls, rank)


def peer_sum_by_shares(x: Tensor, inboxes: Tensor, calls: Tensor, rank: int, largest: int) -> Tensor:
    """Return what `peer_sum` returns; each rank adds a share of the message and sends the sum to the others.

    The arguments are those of `peer_sum`, with inboxes of `share_inbox_bytes(largest, N)` bytes at multiples of 16
    bytes, and `[share_parts(largest, N)]` numbers of calls. Calls of the two functions share neither.
    """
    parts = share_parts(x.nbytes, len(inboxes)), share_parts(largest, len(inboxes))
    return _sum(_peer_sum_by_shares_kernel, parts, x, inboxes, calls, rank)


def _sum(kernel: Any, parts: tuple[int, int], x: Tensor, inboxes: Tensor, calls: Tensor, rank: int) -> Tensor:
    """Launch a kernel; `parts` are the numbers of programs of this message and of the largest one."""
    out, follow = torch.empty_like(x), supports_dependent_launch(x.device)
    words = (each.view(-1).view(torch.int32) for each in (x, out))
    kernel[parts[:1]](
        *words, inboxes, calls, x.nbytes // 4,
        RANK=rank, RANKS=len(inboxes), PARTS=parts[1], HALVES=x.dtype == torch.bfloat16, WORDS=WORDS,
        FOLLOW=follow, launch_pdl=follow, num_warps=4,
    )  # fmt: skip
    return out
