"""Plain and speculative decoding in turn on the same prompts: speed, acceptance, equality of texts, memory."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from redrafter.drafting.search_proposer import SearchProposer
from redrafter.measure.differences import find_differences
from redrafter.measure.floors import resident_bytes
from redrafter.measure.run import StreamedRun
from redrafter.measure.workload import Workload

__all__ = ["DecodingSpeed", "Equality", "Memory", "Throughput", "measure_speedup", "peak_memory"]


@dataclass(frozen=True)
class DecodingSpeed:
    """The speed of plain or speculative decoding; medians over repeats.

    Attributes:
        first_request_s: Seconds of the first call at this batch size, which captures and may compile.
        tokens_per_second: New tokens of all rows per second, prefill included.
        ttft_ms: Milliseconds from the call to the first token of a batch.
        tpot_ms: Milliseconds per token of a row after its first.
        steps: Steps of all batches of one repeat.
        step_wall_ms: Milliseconds per step of a batch, prefill excluded.
    """

    first_request_s: float
    tokens_per_second: float
    ttft_ms: float
    tpot_ms: float
    steps: int
    step_wall_ms: float


@dataclass(frozen=True)
class Memory:
    """Peak GPU memory, in bytes.

    Attributes:
        weights: Weights and buffers of model and drafter.
        pools: Paged pools of keys and values.
        beyond: Allocated beside weights and pools.
        reserved: Reserved by torch beside weights and pools; it includes the memory of captured graphs.
    """

    weights: int
    pools: int
    beyond: int
    reserved: int


@dataclass(frozen=True)
class Equality:
    """The outcome of comparing the rows of plain and of speculative decoding.

    Attributes:
        equal: Whether no row differs.
        rows: Rows compared.
        divergent: Rows that differ.
        first: The difference at the earliest new token, of those that rounding cannot explain if there are such: its
            `prompt`, its `token`, the ids that were written there (`plain`, `speculative`), by how much the best logit
            leads the second (`margin`), whether these are the two ids (`top_two`), and whether it is a `near_tie`. None
            where all rows are equal; `margin` and `top_two` are None when sampling.
        largest_margin: Largest margin of any row that differs; None where none has a margin.
    """

    equal: bool
    rows: int
    divergent: int
    first: dict[str, Any] | None
    largest_margin: float | None

    @classmethod
    def of(cls, work: Workload, plain: Sequence[Sequence[int]], speculative: Sequence[Sequence[int]]) -> "Equality":
        """Compare new tokens by row; row i continues prompt i of the workload, modulo the number of prompts."""
        prompts = [work.prompts[row % len(work.prompts)] for row in range(len(plain))]
        arguments = work.arguments() | {"seed": work.seed}
        differences = find_differences(work.engine, arguments, prompts, plain, [speculative])
        first = min(differences, key=lambda difference: (difference.near_tie, difference.token), default=None)
        return cls(
            equal=not differences,
            rows=len(plain),
            divergent=len(differences),
            first=None
            if first is None
            else {
                "prompt": first.prompt % len(work.prompts),
                "token": first.token,
                "plain": first.plain,
                "speculative": first.other,
                "margin": first.lead,
                "top_two": first.top_two,
                "near_tie": first.near_tie,
            },
            largest_margin=max((each.lead for each in differences if each.lead is not None), default=None),
        )


@dataclass(frozen=True)
class Throughput:
    """Plain and speculative decoding at one batch size.

    Attributes:
        batch_size: Rows in a batch.
        batches: Batches of one repeat.
        tokens: New tokens of one repeat, either way.
        shape: Beams, draft length and nodes of the tree; None where speculation is off.
        plain: Speed of plain decoding.
        speculative: Speed of speculative decoding.
        speedup: Time of plain decoding over that of speculative decoding, the median of the repeats' own ratios.
        tokens_per_step: New tokens of a row per step.
        accepted_by_depth: Entry d is the share of steps in which at least d + 1 drafts became output.
        equality: Whether both wrote the same texts.
        memory: Peak GPU memory; None on a CPU.
    """

    batch_size: int
    batches: int
    tokens: int
    shape: dict[str, int] | None
    plain: DecodingSpeed
    speculative: DecodingSpeed
    speedup: float
    tokens_per_step: float
    accepted_by_depth: list[float]
    equality: Equality
    memory: Memory | None


def measure_speedup(work: Workload, rows: int, repeats: int) -> Throughput:
    """Decode every batch of `rows` rows both ways, one after the other; which goes first alternates by repeat."""
    batches = work.batches(rows)
    ways = (False, True)  # speculate
    first = {way: work.run(batches[0], way).seconds for way in ways}
    if work.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(work.device)
    runs: dict[bool, list[list[StreamedRun]]] = {way: [] for way in ways}  # by way, repeat and batch
    for repeat in range(repeats):
        for way in ways:
            runs[way].append([])
        for index, batch in enumerate(batches):
            for way in ways if repeat % 2 == 0 else ways[::-1]:
                runs[way][-1].append(work.run(batch, way, seed=index * rows))
    memory = peak_memory(work)
    plain, speculative = (_decoding_speed(work, runs[way], first[way]) for way in ways)
    ratios = [_seconds(a) / _seconds(b) for a, b in zip(runs[False], runs[True], strict=True)]
    stats = [run.stats for run in runs[True][0]]
    steps, emitted = sum(s.steps for s in stats), sum(s.emitted for s in stats)
    depths = zip(*(s.accepted_by_depth for s in stats), strict=True)
    texts = [[row for run in runs[way][0] for row in run.tokens] for way in ways]
    return Throughput(
        batch_size=rows,
        batches=len(batches),
        tokens=sum(run.count for run in runs[True][0]),
        shape=_shape(work, rows),
        plain=plain,
        speculative=speculative,
        speedup=statistics.median(ratios),
        tokens_per_step=emitted / steps,
        accepted_by_depth=[sum(depth) / steps for depth in depths],
        equality=Equality.of(work, *texts),
        memory=memory,
    )


def _decoding_speed(work: Workload, repeats: list[list[StreamedRun]], first: float) -> DecodingSpeed:
    rest = [sum(run.seconds - run.first_token for run in runs) for runs in repeats]
    steps = [sum(run.steps for run in runs) for runs in repeats]
    return DecodingSpeed(
        first_request_s=first,
        tokens_per_second=statistics.median(sum(run.count for run in runs) / _seconds(runs) for runs in repeats),
        ttft_ms=1e3 * statistics.median(run.first_token for runs in repeats for run in runs),
        tpot_ms=1e3 * statistics.median(rest) / (len(repeats[0]) * (work.max_new_tokens - 1)),
        steps=steps[0],
        step_wall_ms=1e3 * statistics.median(r / s for r, s in zip(rest, steps, strict=True)),
    )


def _seconds(runs: list[StreamedRun]) -> float:
    return sum(run.seconds for run in runs)


def _shape(work: Workload, rows: int) -> dict[str, int] | None:
    proposer = work.proposer(rows, speculate=True)
    if not isinstance(proposer, SearchProposer):
        return None
    return {"num_beams": proposer.beams, "draft_len_per_beam": proposer.depth, "nodes": proposer.nodes}


def peak_memory(work: Workload) -> Memory | None:
    """Return the peak GPU memory since torch's statistics were last reset; None on a CPU."""
    if work.device.type != "cuda":
        return None
    weights = resident_bytes(work.engine.model, work.engine.drafter)
    pools = work.engine.kv_pool_bytes
    return Memory(
        weights=weights,
        pools=pools,
        beyond=torch.cuda.max_memory_allocated(work.device) - weights - pools,
        reserved=torch.cuda.max_memory_reserved(work.device) - weights - pools,
    )
