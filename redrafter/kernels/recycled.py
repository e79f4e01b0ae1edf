"""Read and write a table of recycled tokens: a launch for the beams of all rows, and two for the nodes of a step."""

import torch
import triton
import triton.language as tl
from torch import Tensor

GAMMA = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))  # of `redrafter.sampling.noise`


@triton.jit
def _place_of(key, entries):
    return ((key ^ (key >> 24)) * GAMMA >> 40) & (entries - 1)


@triton.jit(do_not_specialize=["beams"])
def _read_kernel(
    KEYS, IDS, LOGITS, SHARING, BEFORE, TOKENS, OUT_IDS, OUT_LOGITS, beams, entries,
    C: tl.constexpr, BLOCK: tl.constexpr, UNKNOWN: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Read the two entries of one beam of one row, and give a token that both have the larger logit."""
    row, beam = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at, c = row * beams + beam, tl.arange(0, BLOCK)
    single = tl.load(SHARING + row) + tl.load(TOKENS + at)
    pair = single + ((tl.load(BEFORE + at) + 1) << SHIFT)
    first, second = _place_of(pair, entries), _place_of(single, entries)
    # The tokens of another key are not shown, as its text may be another client's.
    known, other_known = tl.load(KEYS + first) == pair, tl.load(KEYS + second) == single
    ids = tl.where(c < C, tl.where(known, tl.load(IDS + first * C + c, c < C, 0), c), -1)
    other_ids = tl.where(c < C, tl.where(other_known, tl.load(IDS + second * C + c, c < C, 0), c), -2)
    logits = tl.where(known, tl.load(LOGITS + first * C + c, c < C, 0.0).to(tl.float32), UNKNOWN)
    others = tl.where(other_known, tl.load(LOGITS + second * C + c, c < C, 0.0).to(tl.float32), UNKNOWN)
    same = ids[:, None] == other_ids[None, :]
    logits = tl.maximum(logits, tl.max(tl.where(same, others[None, :], float("-inf")), 1))
    others = tl.where(tl.max(same.to(tl.int32), 0) > 0, float("-inf"), others)
    out = at * 2 * C + c
    tl.store(OUT_IDS + out, ids, c < C)
    tl.store(OUT_IDS + out + C, other_ids, c < C)
    tl.store(OUT_LOGITS + out, logits, c < C)
    tl.store(OUT_LOGITS + out + C, others, c < C)


def read_entries(
    table: tuple[Tensor, Tensor, Tensor],
    sharing: Tensor,
    before: Tensor,
    tokens: Tensor,
    *,
    unknown: float,
    token_bits: int,
) -> tuple[Tensor, Tensor]:
    """Read entries as `redrafter.drafting.recycled.read_entries` does, with the same arguments and results."""
    (keys, ids, logits), (rows, beams), count = table, tokens.shape, table[1].shape[1]
    found = tokens.new_empty(rows, beams, 2 * count)
    scores = torch.empty_like(found, dtype=torch.float32)
    _read_kernel[(rows, beams)](
        keys, ids, logits, sharing.contiguous(), before.contiguous(), tokens.contiguous(), found, scores, beams,
        len(keys), C=count, BLOCK=triton.next_power_of_2(count), UNKNOWN=unknown, SHIFT=token_bits, num_warps=1,
    )  # fmt: skip
    return found, scores


@triton.jit(do_not_specialize=["count"])
def _claim_kernel(KEY, WRITTEN, WINNER, count, entries, BLOCK: tl.constexpr):
    """Let one of the keys that have a place in common win it."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = (index < count) & (tl.load(WRITTEN + index, index < count, 0) != 0)
    tl.store(WINNER + _place_of(tl.load(KEY + index, live, 0), entries), index, live)


@triton.jit(do_not_specialize=["new"])
def _write_kernel(
    KEY, WRITTEN, NEW_IDS, NEW_LOGITS, WINNER, KEYS, IDS, LOGITS, new, entries, C: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write one entry if its key has won its place."""
    index, c = tl.program_id(0), tl.arange(0, BLOCK)
    key = tl.load(KEY + index)
    place = _place_of(key, entries)
    wins = (tl.load(WRITTEN + index) != 0) & (tl.load(WINNER + place) == index)
    source = (index % new).to(tl.int64) * C + c
    tl.store(KEYS + place, key, wins)
    tl.store(IDS + place * C + c, tl.load(NEW_IDS + source, c < C, 0), wins & (c < C))
    tl.store(LOGITS + place * C + c, tl.load(NEW_LOGITS + source, c < C, 0.0), wins & (c < C))


def write_entries(
    table: tuple[Tensor, Tensor, Tensor], key: Tensor, ids: Tensor, logits: Tensor, written: Tensor
) -> None:
    """Write entries as `redrafter.drafting.recycled.write_entries` does, with the same arguments."""
    count, (entries, size) = len(key), table[1].shape
    winner = torch.empty(entries, dtype=torch.int32, device=key.device)
    written = written.contiguous().view(torch.int8)
    _claim_kernel[(triton.cdiv(count, 128),)](key, written, winner, count, entries, BLOCK=128, num_warps=1)
    _write_kernel[(count,)](
        key, written, ids.contiguous(), logits.contiguous(), winner, *table, len(ids), entries,
        C=size, BLOCK=triton.next_power_of_2(size), num_warps=1,
    )  # fmt: skip
