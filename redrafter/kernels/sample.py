"""Drawing from scores on a GPU without a second buffer of their size: noise, and its argmax with them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["gumbel", "sample_tokens"]

CHUNK = 4096  # ids per program
GAMMA, MIX_1, MIX_2 = (tl.constexpr(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@triton.jit
def _mix(x):
    """SplitMix64's finalizer, on uint64."""
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


@triton.jit
def _noise(STREAM, OUT, vocab, CHUNK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    stream = tl.load(STREAM + place).to(tl.uint64, bitcast=True)
    bits = _mix(stream + (at + 1).to(tl.uint64) * GAMMA)
    v = ((bits >> 11).to(tl.int64).to(tl.float32) + 0.5) * 1.1102230246251565e-16  # 2^-53
    v = tl.minimum(v, 1 - 5.9604644775390625e-08)  # 2^-24
    w = 1 - v
    log1p = tl.log(w) - ((w - 1) + v) / w  # of -v, without the error of rounding w
    tl.store(OUT + place * vocab + at, -tl.log(-log1p), at < vocab)


def gumbel(stream: Tensor, vocab: int) -> Tensor:
    """`redrafter.sampling.noise.gumbel` of ids 0 to `vocab` - 1, from the starts of its streams `[B, P]` int64. Returns
    `[B, P, V]` float32."""
    out = torch.empty(*stream.shape, vocab, dtype=torch.float32, device=stream.device)
    grid = (stream.numel(), triton.cdiv(vocab, CHUNK))
    _noise[grid](stream.contiguous(), out, vocab, CHUNK=CHUNK, num_warps=8)
    return out


@triton.jit(do_not_specialize=["nodes", "depths"])
def _scan(
    LOGITS, TEMPERATURE, NOISE, DEPTH, TOPS, IDS, nodes, depths, vocab, chunks, CHUNK: tl.constexpr, NOISY: tl.constexpr
):
    place, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = place // nodes
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    held = at < vocab
    x = tl.load(LOGITS + place * vocab + at, held, float("-inf")).to(tl.float32)
    if NOISY:
        noise = NOISE + (row * depths + tl.load(DEPTH + place)) * vocab
        x = x / tl.load(TEMPERATURE + row) + tl.load(noise + at, held, 0.0)
    x = tl.where(x == x, x, float("inf"))  # as torch has it; else the index could lie past the vocabulary
    best, where = tl.max(x, 0, return_indices=True)
    tl.store(TOPS + place * chunks + chunk, best)
    tl.store(IDS + place * chunks + chunk, chunk * CHUNK + where)


@triton.jit
def _best(TOPS, IDS, OUT, chunks, BLOCK: tl.constexpr):
    place, chunk = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    _, where = tl.max(tl.load(TOPS + place * chunks + chunk, chunk < chunks, float("-inf")), 0, return_indices=True)
    tl.store(OUT + place, tl.load(IDS + place * chunks + where).to(tl.int64))


def sample_tokens(logits: Tensor, temperature: Tensor, noise: Tensor | None, depth: Tensor) -> Tensor:
    """The argmax of `logits / temperature + noise` at every node, the first one on a tie; of `logits` without noise.

    logits: `[B, N, V]`. temperature: `[B]` float32. noise: `[B, K+1, V]` float32. depth: `[B, N]` int64, which noise is
    a node's. Returns `[B, N]` int64.
    """
    rows, nodes, vocab = logits.shape
    logits, chunks = logits.contiguous(), triton.cdiv(vocab, CHUNK)
    tops = logits.new_empty(rows, nodes, chunks, dtype=torch.float32)
    ids = torch.empty_like(tops, dtype=torch.int32)
    out = torch.empty(rows, nodes, dtype=torch.long, device=logits.device)
    _scan[(rows * nodes, chunks)](
        logits, temperature, noise, depth.contiguous(), tops, ids,
        nodes, 0 if noise is None else noise.shape[1], vocab, chunks,
        CHUNK=CHUNK, NOISY=noise is not None, num_warps=8,
    )  # fmt: skip
    _best[(rows * nodes,)](tops, ids, out, chunks, BLOCK=triton.next_power_of_2(chunks), num_warps=1)
    return out
