"""Sampling on a GPU without a second buffer of the size of the logits: Gumbel noise, and the argmax under it.

A drafter's scores under noise are a buffer of their own, which one pass writes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096  # token ids per program
GAMMA, MIX_1, MIX_2 = (tl.constexpr(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@triton.jit
def _mix(x):
    """Apply SplitMix64's finalizer to uint64 numbers."""
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


@triton.jit(do_not_specialize=["count"])
def _gumbel_kernel(SEEDS, POSITIONS, OUT, vocab, count, CHUNK: tl.constexpr):
    """Write the noise of one position for a chunk of token ids."""
    position = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    seed = tl.load(SEEDS + position // count).to(tl.uint64, bitcast=True)
    stream = _mix(_mix(seed * GAMMA) + tl.load(POSITIONS + position).to(tl.uint64, bitcast=True) * GAMMA)
    bits = _mix(stream + (at + 1).to(tl.uint64) * GAMMA)
    v = ((bits >> 11).to(tl.int64).to(tl.float32) + 0.5) * 1.1102230246251565e-16  # 2^-53
    v = tl.minimum(v, 1 - 5.9604644775390625e-08)  # 2^-24
    w = 1 - v
    log1p = tl.log(w) - ((w - 1) + v) / w  # log(1 - v), corrected for the rounding of w
    tl.store(OUT + position * vocab + at, -tl.log(-log1p), at < vocab)


def gumbel(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Return Gumbel noise `[B, P, V]` float32, as `redrafter.sampling.noise.gumbel` does.

    Args:
        seeds: Seed of each row, `[B]` int64.
        positions: Positions of the tokens, `[B, P]` int64.
        ids: 0 to V - 1, the token ids that the noise belongs to, `[V]`.
    """
    (rows, count), vocab = positions.shape, len(ids)
    out = torch.empty(rows, count, vocab, dtype=torch.float32, device=positions.device)
    grid = (rows * count, triton.cdiv(vocab, CHUNK))
    _gumbel_kernel[grid](seeds.contiguous(), positions.contiguous(), out, vocab, count, CHUNK=CHUNK, num_warps=8)
    return out


@triton.jit(do_not_specialize=["nodes", "depths"])
def _top_of_chunk_kernel(
    LOGITS, TEMPERATURE, NOISE, ROWS, DEPTH, TOPS, IDS, nodes, depths, vocab, chunks, CHUNK: tl.constexpr
):
    """Find the best token of one chunk of ids at one node."""
    node, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = node // nodes if ROWS is None else tl.load(ROWS + node)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = at < vocab
    x = tl.load(LOGITS + node * vocab + at, inside, float("-inf")).to(tl.float32)
    if NOISE is not None:
        noise = NOISE + (row * depths + tl.load(DEPTH + node)) * vocab
        x = x / tl.load(TEMPERATURE + row) + tl.load(noise + at, inside, 0.0)
    x = tl.where(
        x == x, x, float("inf")
    )  # NaN is the largest, as in torch; otherwise the index could be past the vocabulary
    # Scores under noise are compared in registers; only the best of each chunk is written.
    best, where = tl.max(x, 0, return_indices=True)
    tl.store(TOPS + node * chunks + chunk, best)
    tl.store(IDS + node * chunks + chunk, chunk * CHUNK + where)


@triton.jit
def _top_of_node_kernel(TOPS, IDS, LOGITS, OUT, chunks, vocab, BLOCK: tl.constexpr):
    """Find the best token at one node among the best of its chunks, and whether its logit is finite."""
    node, chunk = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    _, where = tl.max(tl.load(TOPS + node * chunks + chunk, chunk < chunks, float("-inf")), 0, return_indices=True)
    best = tl.load(IDS + node * chunks + where).to(tl.int64)
    tl.store(OUT + 2 * node, best)
    tl.store(OUT + 2 * node + 1, (tl.abs(tl.load(LOGITS + node * vocab + best)) < float("inf")).to(tl.int64))


def draw_tokens(logits: Tensor, temperature: Tensor, noise: Tensor | None, depth: Tensor, row: Tensor | None) -> Tensor:
    """Draw a token at every node: the argmax of `logits / temperature + noise`, the first one on a tie.

    Args:
        logits: The target's logits, `[B, N, V]`.
        temperature: Temperature of each row, `[B]` float32.
        noise: Gumbel noise by depth, `[B, K+1, V]` float32; None for the argmax of `logits` (greedy).
        depth: Depth of each node, `[B, N]` int64.
        row: The row of temperature and noise of each node, `[B, N]` int64; None for the node's own row.

    Returns:
        The tokens, and then 1 where the token's logit is finite, else 0, `[B, N, 2]` int64.
    """
    rows, nodes, vocab = logits.shape
    logits, chunks = logits.contiguous(), triton.cdiv(vocab, CHUNK)
    tops = logits.new_empty(rows, nodes, chunks, dtype=torch.float32)
    ids = torch.empty_like(tops, dtype=torch.int32)
    out = torch.empty(rows, nodes, 2, dtype=torch.long, device=logits.device)
    _top_of_chunk_kernel[(rows * nodes, chunks)](
        logits, temperature, noise, row, depth.contiguous(), tops, ids,
        nodes, 0 if noise is None else noise.shape[1], vocab, chunks, CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    block = triton.next_power_of_2(chunks)
    _top_of_node_kernel[(rows * nodes,)](tops, ids, logits, out, chunks, vocab, BLOCK=block, num_warps=1)
    return out


@triton.jit(do_not_specialize=["beams"])
def _noisy_kernel(
    LOGITS, TEMPERATURE, NOISE, IDS, OUT, beams, vocab, noise_row, ids_row, CHUNK: tl.constexpr, NAMED: tl.constexpr
):
    """Write the scores of one chunk of ids of one beam."""
    beam, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    row, inside = beam // beams, at < vocab
    ids = tl.load(IDS + beam * ids_row + at, inside, 0) if NAMED else at
    noise = tl.load(NOISE + row * noise_row + ids, inside, 0.0)
    x = tl.load(LOGITS + beam * vocab + at, inside, 0.0).to(tl.float32)
    tl.store(OUT + beam * vocab + at, x / tl.load(TEMPERATURE + row) + noise, inside)


def noisy_scores(logits: Tensor, temperature: Tensor, noise: Tensor, ids: Tensor | None) -> Tensor:
    """Return a drafter's logits divided by temperatures, plus the noise of each id, `[B, w, V']` float32.

    Args:
        logits: The drafter's logits, `[B, w, V']`.
        temperature: Temperature of each row, `[B]` float32.
        noise: Gumbel noise of the position, `[B, V]` float32, in which the numbers of a row are contiguous.
        ids: The target's id of each logit, `[V']` or `[B, w, V']` int64; None where they are the same.
    """
    rows, beams, vocab = logits.shape
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    _noisy_kernel[(rows * beams, triton.cdiv(vocab, CHUNK))](
        logits.contiguous(), temperature, noise, ids, out, beams, vocab, noise.stride(0),
        0 if ids is None or ids.dim() == 1 else vocab, CHUNK=CHUNK, NAMED=ids is not None, num_warps=8,
    )  # fmt: skip
    return out
