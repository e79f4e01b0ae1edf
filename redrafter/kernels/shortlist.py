"""A head in two stages on a GPU: candidates by rough scores, their exact scores, and the best continuations.

The search of a level is then three small programs, for any vocabulary. Candidates are chosen by parts: each part of the
ids contributes its best few, so that no program reads all scores. Parts consist of interleaved runs of neighbouring
ids, as the ids of frequent tokens are neighbours. One of the best tokens is lost only if as many better ones are in its
part.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.launch import supports_dependent_launch, widening_assembly
from redrafter.kernels.linear import widen

BEST = 4  # ids per part: with 32 parts, an id of rank 20 is lost once in 250 times, with 2 of 64 once in 27
RUN = 16  # neighbouring ids of one part, the minimum that a load from memory transfers
ROWS, STEP = 4, 1024  # candidates per program, and columns of the head that are read at once
MAX_SEARCHED = 1 << 14  # total candidates of a row's beams that one program searches


@triton.jit
def _under_noise(score, beam, id, TEMPERATURE, NOISE, NAMES, inside, beams, noise_stride, NAMED: tl.constexpr):
    """Return scores adjusted to the target's draw: at its temperature, with its noise."""
    row = beam // beams
    name = tl.load(NAMES + id, inside, 0) if NAMED else id
    return score / tl.load(TEMPERATURE + row) + tl.load(NOISE + row * noise_stride + name, inside, 0.0)


@triton.jit
def _best_of_parts_kernel(
    ROUGH, TEMPERATURE, NOISE, NAMES, IDS, vocab, parts, beams, noise_stride,
    BLOCK: tl.constexpr, BEST: tl.constexpr, RUN: tl.constexpr, NOISY: tl.constexpr, NAMED: tl.constexpr,
    FOLLOW: tl.constexpr,
):  # fmt: skip
    """Find the ids of the best rough scores of one part of one beam."""
    beam, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, BLOCK)
    # Runs are distributed round-robin: frequent ids are neighbours, and would all compete in one part.
    id = (place // RUN * parts + part) * RUN + place % RUN
    inside = id < vocab
    if FOLLOW:
        tl.extra.cuda.gdc_wait()
    x = tl.load(ROUGH + beam * vocab + id, inside, float("-inf")).to(tl.float32)
    if NOISY:
        x = _under_noise(x, beam, id, TEMPERATURE, NOISE, NAMES, inside, beams, noise_stride, NAMED)
    # An entry that is NaN or infinite keeps its own id, so that no id is chosen twice, and none past the vocabulary.
    x = tl.where(inside, tl.where((x > -3e38) & (x < float("inf")), x, -3e38), float("-inf"))
    for rank in range(BEST):
        _, where = tl.max(x, 0, return_indices=True)
        best = (where // RUN * parts + part) * RUN + where % RUN
        tl.store(IDS + (beam * tl.num_programs(1) + part) * BEST + rank, best.to(tl.int64))
        x = tl.where(place == where, float("-inf"), x)


@triton.jit
def _candidate_scores_kernel(
    X, W, SCALE, IDS, TEMPERATURE, NOISE, NAMES, SCORES, width, w_stride, count, beams, noise_stride,
    ROWS: tl.constexpr, STEP: tl.constexpr, WIDEN: tl.constexpr, ASSEMBLY: tl.constexpr, NOISY: tl.constexpr,
    NAMED: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    """Multiply the input of one beam with the head's rows of a few of its candidates."""
    beam, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = place < count
    if FOLLOW:
        tl.extra.cuda.gdc_wait()
    id = tl.load(IDS + beam * count + place, live, 0)
    acc = tl.zeros([ROWS, STEP], tl.float32)
    for start in range(0, width, STEP):
        column = start + tl.arange(0, STEP)
        w = tl.load(W + id[:, None] * w_stride + column, live[:, None] & (column < width), 0)
        if WIDEN:
            w = widen(w, X, ASSEMBLY)
        # Products are summed at the end of the loop, as a sum in each step would cost a reduction between threads.
        acc += w.to(tl.float32) * tl.load(X + beam * width + column, column < width, 0.0).to(tl.float32)
    score = tl.sum(acc, 1)
    if WIDEN:
        score *= tl.load(SCALE + id, live, 0.0)
    if NOISY:
        score = _under_noise(score, beam, id, TEMPERATURE, NOISE, NAMES, live, beams, noise_stride, NAMED)
    tl.store(SCORES + beam * count + place, score, live)


@triton.jit
def _best_candidates_kernel(
    SCORES, IDS, TOTAL, NAMES, SCORE, SOURCE, TOKEN, beams, count,
    WIDE: tl.constexpr, BLOCK_BEAMS: tl.constexpr, BLOCK_COUNT: tl.constexpr, NAMED: tl.constexpr,
    FOLLOW: tl.constexpr,
):  # fmt: skip
    """Find the best pairs of source beam and candidate of one row, by cumulative log-probability."""
    row, beam, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_BEAMS), tl.arange(0, BLOCK_COUNT)
    first = row * beams * count
    live = (beam < beams)[:, None] & (place < count)
    if FOLLOW:
        tl.extra.cuda.gdc_wait()
    x = tl.load(SCORES + first + beam[:, None] * count + place, live, float("-inf"))
    x = tl.where((x > -3e38) & (x < float("inf")), x, -3e38)
    top = tl.max(x, 1)
    whole = top + tl.log(tl.sum(tl.where(live, tl.exp(x - top[:, None]), 0.0), 1))
    total = tl.load(TOTAL + row * beams + beam, beam < beams, 0.0)
    # In this order rounding cannot make a continuation likelier than its beam, which pruning the tree relies on.
    x = tl.where(live, total[:, None] + (x - whole[:, None]), float("-inf"))
    x = tl.reshape(x, [BLOCK_BEAMS * BLOCK_COUNT])
    entries = tl.arange(0, BLOCK_BEAMS * BLOCK_COUNT)
    for turn in range(WIDE):
        best, where = tl.max(x, 0, return_indices=True)
        source = where // BLOCK_COUNT
        token = tl.load(IDS + first + source * count + where % BLOCK_COUNT)
        if NAMED:
            token = tl.load(NAMES + token)
        out = row * WIDE + turn
        tl.store(SCORE + out, best)
        tl.store(SOURCE + out, source.to(tl.int64))
        tl.store(TOKEN + out, token)
        x = tl.where(entries == where, float("-inf"), x)


def best_of_parts(
    rough: Tensor, count: int, temperature: Tensor | None, noise: Tensor | None, names: Tensor | None
) -> Tensor:
    """Return at least `count` likely ids of every beam, `[B, w, C]` int64, the best few of each part of the ids.

    Args:
        rough: Rough logits, `[B, w, V']`.
        count: Number of ids wanted, at most a quarter of V'.
        temperature: Temperature of each row, `[B]` float32; None without noise.
        noise: The target's noise, `[B, V]` float32; rows need not be contiguous. None to choose by the logits.
        names: The target's id of each of the proposer's ids, `[V']` int64; None if they are the same.
    """
    rows, beams, vocab = rough.shape
    parts, follow = triton.cdiv(count, BEST), supports_dependent_launch(rough.device)
    ids = torch.empty(rows, beams, parts * BEST, dtype=torch.long, device=rough.device)
    block = triton.next_power_of_2(triton.cdiv(vocab, parts * RUN) * RUN)
    _best_of_parts_kernel[(rows * beams, parts)](
        rough.contiguous(), temperature, noise, names, ids, vocab, parts, beams,
        0 if noise is None else noise.stride(0),
        BLOCK=block, BEST=BEST, RUN=RUN, NOISY=noise is not None, NAMED=names is not None, FOLLOW=follow,
        launch_pdl=follow, num_warps=min(max(block // 1024, 1), 16),
    )  # fmt: skip
    return ids


def candidate_scores(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    ids: Tensor,
    temperature: Tensor | None,
    noise: Tensor | None,
    names: Tensor | None,
) -> Tensor:
    """Return the scores of every beam's candidates, `[B, w, C]` float32.

    Args:
        x: Inputs of the head, `[B, w, R]`.
        weight: The head, `[V', R]`, of the inputs' dtype or float8_e4m3fn.
        scale: Multiplier of each row of an FP8 head, `[V']` float32; else None.
        ids: The candidates, `[B, w, C]` int64.
        temperature: As in `best_of_parts`.
        noise: As in `best_of_parts`.
        names: As in `best_of_parts`.
    """
    (rows, beams, width), count, widens = x.shape, ids.shape[-1], scale is not None
    scores, follow = torch.empty_like(ids, dtype=torch.float32), supports_dependent_launch(x.device)
    _candidate_scores_kernel[(rows * beams, triton.cdiv(count, ROWS))](
        x.contiguous(), weight.view(torch.uint8) if widens else weight, scale, ids, temperature, noise, names, scores,
        width, weight.stride(0), count, beams, 0 if noise is None else noise.stride(0),
        ROWS=ROWS, STEP=min(STEP, triton.next_power_of_2(width)), WIDEN=widens,
        ASSEMBLY=widening_assembly(weight.dtype, x.dtype, x.device), NOISY=noise is not None, NAMED=names is not None,
        FOLLOW=follow, launch_pdl=follow, num_warps=4,
    )  # fmt: skip
    return scores


def best_candidates(
    scores: Tensor, ids: Tensor, total: Tensor, width: int, names: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Select the best pairs of a beam and a candidate that follows it, as `Candidates.best` does.

    Args:
        scores: Scores of the candidates, `[B, w, C]` float32, at most `MAX_SEARCHED` per row.
        ids: The candidates, `[B, w, C]` int64.
        total: Cumulative log-probabilities of the beams so far, `[B, w]` float32.
        width: W, pairs to select.
        names: As in `best_of_parts`.
    """
    rows, beams, count = scores.shape
    score = scores.new_empty(rows, width)
    source, follow = torch.empty_like(score, dtype=torch.long), supports_dependent_launch(scores.device)
    token = torch.empty_like(source)
    block_beams, block_count = triton.next_power_of_2(beams), triton.next_power_of_2(count)
    _best_candidates_kernel[(rows,)](
        scores.contiguous(), ids.contiguous(), total.contiguous(), names, score, source, token, beams, count,
        WIDE=width, BLOCK_BEAMS=block_beams, BLOCK_COUNT=block_count, NAMED=names is not None, FOLLOW=follow,
        launch_pdl=follow, num_warps=min(max(block_beams * block_count // 256, 4), 16),
    )  # fmt: skip
    return score, source, token
