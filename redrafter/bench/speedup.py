"""Plain and speculative decoding in turn on the same prompts: speed, acceptance, equality of texts, memory."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from redrafter.drafting.proposer import SearchProposer
from redrafter.measure.differences import find_differences
from redrafter.measure.floors import resident_bytes
from redrafter.measure.run import Arrival, Repeats, Workload

__all__ = [
    "Equality",
    "SteadyState",
    "Throughput",
    "measure_speedup",
    "measure_steady_state",
    "peak_memory",
    "steady_rate",
]


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

    @classmethod
    def of(cls, ran: Repeats, first_request_s: float, new_tokens: int) -> "DecodingSpeed":
        """Return the speed of repeats whose rows wrote `new_tokens` tokens each."""
        rest = [sum(run.seconds - run.first_token for run in runs) for runs in ran.repeats]
        steps = [sum(run.steps for run in runs) for runs in ran.repeats]
        return cls(
            first_request_s=first_request_s,
            tokens_per_second=statistics.median(ran.tokens_per_second),
            ttft_ms=1e3 * statistics.median(run.first_token for runs in ran.repeats for run in runs),
            tpot_ms=1e3 * statistics.median(rest) / (len(ran.repeats[0]) * (new_tokens - 1)),
            steps=steps[0],
            step_wall_ms=1e3 * statistics.median(r / s for r, s in zip(rest, steps, strict=True)),
        )


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
        memory: Peak GPU memory, as `peak_memory` returns it; None on a CPU.
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
    memory: dict[str, int] | None


def measure_speedup(work: Workload, rows: int, repeats: int) -> Throughput:
    """Decode every batch of `rows` rows both ways, one after the other; which goes first alternates by repeat."""
    batches = work.batches(rows)
    ways = (False, True)  # speculate
    first = {way: work.run(batches[0], way).seconds for way in ways}
    if work.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(work.device)
    ran = {way: Repeats() for way in ways}
    for repeat in range(repeats):
        for way in ways:
            ran[way].repeats.append([])
        for index, batch in enumerate(batches):
            for way in ways if repeat % 2 == 0 else ways[::-1]:
                ran[way].repeats[-1].append(work.run(batch, way, seed=index * rows))
    proposer, stats = work.proposer(rows, speculate=True), ran[True].stats
    shape = None
    if isinstance(proposer, SearchProposer):
        shape = {"num_beams": proposer.beams, "draft_len_per_beam": proposer.depth, "nodes": proposer.nodes}
    return Throughput(
        batch_size=rows,
        batches=len(batches),
        tokens=sum(map(len, ran[True].texts())),
        shape=shape,
        plain=DecodingSpeed.of(ran[False], first[False], work.max_new_tokens),
        speculative=DecodingSpeed.of(ran[True], first[True], work.max_new_tokens),
        speedup=ran[True].speedup(ran[False]),
        tokens_per_step=stats.tokens_per_step,
        accepted_by_depth=[count / stats.steps for count in stats.accepted_by_depth],
        memory=peak_memory(work),
        equality=Equality.of(work, ran[False].texts(), ran[True].texts()),
    )


def peak_memory(work: Workload) -> dict[str, int] | None:
    """Return the peak GPU memory since torch's statistics were last reset, in bytes; None on a CPU.

    Returns:
        `weights` and buffers of model and drafter; the paged `pools` of keys and values; what was allocated `beyond`
        both; and what torch has `reserved` beyond both, with the memory of captured graphs.
    """
    if work.device.type != "cuda":
        return None
    weights, pools = resident_bytes(work.engine.model, work.engine.drafter), work.engine.kv_pool_bytes
    beyond, reserved = torch.cuda.max_memory_allocated(work.device), torch.cuda.max_memory_reserved(work.device)
    known = weights + pools
    return {"weights": weights, "pools": pools, "beyond": beyond - known, "reserved": reserved - known}


@dataclass(frozen=True)
class QueueSpeed:
    """The speed of one call with more prompts than rows.

    Attributes:
        tokens_per_second: New tokens of all texts per second, prefill included.
        steady_tokens_per_second: The same from when all rows have begun until the last text begins; None where no text
            had to wait.
        tokens_per_step: New tokens of a text per step.
    """

    tokens_per_second: float
    steady_tokens_per_second: float | None
    tokens_per_step: float


@dataclass(frozen=True)
class SteadyState:
    """Plain and speculative decoding of one call with more prompts than rows.

    Attributes:
        batch_size: Rows decoded at once.
        prompts: Prompts of the call.
        plain: Speed of plain decoding.
        speculative: Speed of speculative decoding.
    """

    batch_size: int
    prompts: int
    plain: QueueSpeed
    speculative: QueueSpeed

    @property
    def speedup(self) -> float:
        """Speed of speculative decoding over that of plain decoding, of the whole call."""
        return self.speculative.tokens_per_second / self.plain.tokens_per_second


def steady_rate(arrivals: Sequence[Arrival], rows: int) -> float | None:
    """Return tokens per second from when `rows` texts have begun until the last text begins.

    Args:
        arrivals: When each row gained how many tokens, in order.
        rows: Rows decoded at once.

    Returns:
        The rate; None where no text begins after the first `rows` ones.
    """
    begun: dict[int, float] = {}
    for seconds, row, _ in arrivals:
        begun.setdefault(row, seconds)
    begins = sorted(begun.values())
    if len(begins) <= rows or begins[-1] <= begins[rows - 1]:
        return None
    first, last = begins[rows - 1], begins[-1]
    return sum(count for seconds, _, count in arrivals if first < seconds <= last) / (last - first)


def measure_steady_state(work: Workload, rows: int, waves: int) -> SteadyState:
    """Decode `waves` times as many prompts as rows in one call, plainly and speculatively.

    Each way is run once before it is measured, so that nothing is captured in the measured call.

    Args:
        work: The workload.
        rows: Rows decoded at once.
        waves: Prompts of the call, as a multiple of `rows`.
    """
    engine, options = work.engine, work.engine.options
    prompts = [work.prompts[index % len(work.prompts)] for index in range(rows * waves)]
    engine.options = replace(options, max_batch_size=rows)
    try:
        speeds = []
        for speculate in (False, True):
            work.run(prompts, speculate)
            run = work.run(prompts, speculate)
            rate = steady_rate(run.arrivals, rows)
            speeds.append(QueueSpeed(run.tokens_per_second, rate, run.stats.tokens_per_step))
    finally:
        engine.options = options
    return SteadyState(rows, len(prompts), *speeds)
