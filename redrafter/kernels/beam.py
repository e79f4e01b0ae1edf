"""The best continuations of all beams: one pass over the scores, and one over what is left of each chunk."""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["top_continuations"]

CHUNK = 1024  # ids per program of the first pass


@triton.jit
def _survey(SCORES, VALUES, IDS, TOPS, vocab, chunks, WIDE: tl.constexpr, CHUNK: tl.constexpr):
    """Of one chunk of one beam: its largest scores, best first, their ids, and what a log-sum-exp needs of it."""
    beam, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(SCORES + beam * vocab + at, at < vocab, float("-inf")).to(tl.float32)
    x = tl.where(x < float("inf"), x, -3e38)  # what is no number is still some id, and each another one
    top = tl.max(x, 0)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    place = beam * chunks + chunk
    tl.store(TOPS + place * 2, anchor)
    tl.store(TOPS + place * 2 + 1, tl.sum(tl.exp(x - anchor), 0))
    for rank in range(WIDE):
        best, where = tl.max(x, 0, return_indices=True)
        tl.store(VALUES + place * WIDE + rank, best)
        tl.store(IDS + place * WIDE + rank, chunk * CHUNK + where)
        x = tl.where(tl.arange(0, CHUNK) == where, float("-inf"), x)


@triton.jit
def _choose(
    VALUES, IDS, TOPS, TOTAL, NAMES, SCORE, SOURCE, TOKEN, beams, chunks,
    WIDE: tl.constexpr, BLOCK_BEAMS: tl.constexpr, BLOCK_EACH: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
    BLOCK_WIDE: tl.constexpr, NAMED: tl.constexpr,
):  # fmt: skip
    """Of one row: the best pairs of source beam and id, by cumulative log-probability."""
    row = tl.program_id(0).to(tl.int64)
    beam, chunk, each = tl.arange(0, BLOCK_BEAMS), tl.arange(0, BLOCK_CHUNKS), tl.arange(0, BLOCK_EACH)
    live = beam < beams
    place = (row * beams + beam)[:, None] * chunks + chunk
    some = live[:, None] & (chunk < chunks)
    tops = tl.load(TOPS + place * 2, some, float("-inf"))
    sums = tl.load(TOPS + place * 2 + 1, some, 0.0)
    top = tl.max(tops, 1)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    whole = anchor + tl.log(tl.sum(sums * tl.exp(tops - anchor[:, None]), 1))
    base = tl.load(TOTAL + row * beams + beam, live, 0.0) - whole
    found = (row * beams + beam)[:, None] * (chunks * WIDE) + each
    held = live[:, None] & (each < chunks * WIDE)
    x = tl.load(VALUES + found, held, float("-inf")) + base[:, None]
    x = tl.where(held, x, float("-inf"))
    flat = tl.reshape(x, [BLOCK_BEAMS * BLOCK_EACH])
    rank = tl.arange(0, BLOCK_WIDE)
    score, chosen = tl.zeros([BLOCK_WIDE], tl.float32), tl.zeros([BLOCK_WIDE], tl.int32)
    for turn in range(WIDE):
        best, where = tl.max(flat, 0, return_indices=True)
        score, chosen = tl.where(rank == turn, best, score), tl.where(rank == turn, where, chosen)
        flat = tl.where(tl.arange(0, BLOCK_BEAMS * BLOCK_EACH) == where, float("-inf"), flat)
    source, out, kept = chosen // BLOCK_EACH, row * WIDE + rank, rank < WIDE
    token = tl.load(IDS + (row * beams + source) * (chunks * WIDE) + chosen % BLOCK_EACH, kept, 0).to(tl.int64)
    if NAMED:
        token = tl.load(NAMES + token, kept, 0)
    tl.store(SCORE + out, score, kept)
    tl.store(SOURCE + out, source.to(tl.int64), kept)
    tl.store(TOKEN + out, token, kept)


def top_continuations(scores: Tensor, total: Tensor, wide: int, ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """`redrafter.tree.beam_search.top_continuations` on a GPU; the same arguments."""
    rows, beams, vocab = scores.shape
    scores = scores.contiguous()
    chunks = triton.cdiv(vocab, CHUNK)
    values = scores.new_empty(rows, beams, chunks, wide, dtype=torch.float32)
    found = torch.empty_like(values, dtype=torch.int32)
    tops = scores.new_empty(rows, beams, chunks, 2, dtype=torch.float32)
    _survey[(rows * beams, chunks)](scores, values, found, tops, vocab, chunks, WIDE=wide, CHUNK=CHUNK, num_warps=4)
    score = scores.new_empty(rows, wide, dtype=torch.float32)
    source = torch.empty_like(score, dtype=torch.long)
    token = torch.empty_like(source)
    each, across = triton.next_power_of_2(chunks * wide), triton.next_power_of_2(beams)
    _choose[(rows,)](
        values, found, tops, total.contiguous(), ids, score, source, token, beams, chunks,
        WIDE=wide, BLOCK_BEAMS=across, BLOCK_EACH=each, BLOCK_CHUNKS=triton.next_power_of_2(chunks),
        BLOCK_WIDE=triton.next_power_of_2(wide), NAMED=ids is not None,
        num_warps=4 if each * across <= 2048 else 8,
    )  # fmt: skip
    return score, source, token
