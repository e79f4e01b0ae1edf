"""Speed on the same prompts: plain and speculative decoding in turn, with equality and memory, and other libraries'."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import eq
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from redrafter.app.engines import draft_shape
from redrafter.errors import first_line
from redrafter.measure.differences import find_differences
from redrafter.measure.floors import resident_bytes
from redrafter.measure.run import Arrival, Prompts, Repeats, Run, Stopwatch, Workload, padded, run_in_turn

MAX_RIVAL_PROMPTS = 4  # prompts that rivals continue, one at a time
LOOKUP_TOKENS = 10  # drafts per step of Hugging Face's prompt lookup


@dataclass(frozen=True)
class DecodingSpeed:
    """The speed of plain or speculative decoding; medians over repeats."""

    first_request_s: float  # of the first call at this batch size, which captures and may compile
    tokens_per_second: float  # of all rows, prefill included
    ttft_ms: float  # from the call to the first token of a batch
    tpot_ms: float  # per token of a row after its first
    steps: int  # of all batches of one repeat
    step_wall_ms: float  # per step of a batch, prefill excluded

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
    """The outcome of comparing the rows of plain and of speculative decoding."""

    equal: bool
    rows: int  # that were compared
    divergent: int  # of them
    # The difference at the earliest new token, of those that rounding cannot explain if there are such: `prompt` and
    # `token`, the ids written there (`plain`, `speculative`), by how much the best logit leads the second (`margin`),
    # whether these are the two ids (`top_two`; None as the margin when sampling), and whether it is a `near_tie`.
    first: dict[str, Any] | None
    largest_margin: float | None  # of any row that differs

    @classmethod
    def of(cls, work: Workload, plain: Prompts, speculative: Prompts) -> "Equality":
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
    """Plain and speculative decoding at one batch size."""

    batch_size: int
    batches: int  # of one repeat
    tokens: int  # new ones of one repeat, either way
    shape: dict[str, int] | None  # of the tree; None where speculation is off
    plain: DecodingSpeed
    speculative: DecodingSpeed
    speedup: float  # time of plain decoding over that of speculative decoding, the median of the repeats' own ratios
    tokens_per_step: float  # new ones of a row
    accepted_by_depth: list[float]  # entry d is the share of steps in which at least d + 1 drafts became output
    equality: Equality
    memory: dict[str, int] | None  # see `peak_memory`


def measure_speedup(work: Workload, rows: int, repeats: int) -> Throughput:
    """Decode every batch of `rows` rows both ways, one after the other; which goes first alternates by repeat."""

    def way(speculate: bool) -> Callable[[Prompts, int], Run]:
        return lambda batch, first: work.run(batch, speculate, seed=first)

    batches = work.batches(rows)
    first = {speculate: work.run(batches[0], speculate).seconds for speculate in (False, True)}
    if work.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(work.device)
    plain, fast = run_in_turn([way(False), way(True)], batches, repeats, alternate=True)
    stats = fast.stats
    return Throughput(
        batch_size=rows,
        batches=len(batches),
        tokens=sum(map(len, fast.texts())),
        shape=draft_shape(work.proposer(rows, speculate=True)),
        plain=DecodingSpeed.of(plain, first[False], work.max_new_tokens),
        speculative=DecodingSpeed.of(fast, first[True], work.max_new_tokens),
        speedup=fast.speedup(plain),
        tokens_per_step=stats.tokens_per_step,
        accepted_by_depth=[count / stats.steps for count in stats.accepted_by_depth],
        memory=peak_memory(work),
        equality=Equality.of(work, plain.texts(), fast.texts()),
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
    """The speed of one call with more prompts than rows."""

    tokens_per_second: float  # of all texts, prefill included
    steady_tokens_per_second: float | None  # see `steady_rate`
    tokens_per_step: float  # new ones of a text


@dataclass(frozen=True)
class SteadyState:
    """Plain and speculative decoding of one call with more prompts than rows."""

    batch_size: int  # rows decoded at once
    prompts: int
    plain: QueueSpeed
    speculative: QueueSpeed

    @property
    def speedup(self) -> float:
        """Speed of speculative decoding over that of plain decoding, of the whole call."""
        return self.speculative.tokens_per_second / self.plain.tokens_per_second


def steady_rate(arrivals: Sequence[Arrival], rows: int) -> float | None:
    """Return tokens per second from when `rows` texts have begun until the last text begins; None without such a time.

    Args:
        arrivals: When each row gained how many tokens, in order.
        rows: Rows decoded at once.
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
    """Decode `waves` times as many prompts as rows in one call of `rows` rows at once, plainly and speculatively.

    Each way is run once before it is measured, so that nothing is captured in the measured call.
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


@dataclass(frozen=True)
class Rival:
    """One baseline at batch 1: Hugging Face's own `generate`, in the same process."""

    name: str  # one of `RIVALS`
    what: str  # description of the baseline
    prompts: int  # that it continued
    tokens_per_second: float | None = None  # None where it failed, like all numbers below
    speedup: float | None = None  # this library's speculative tokens per second over the baseline's, on these prompts
    first_request_s: float | None = None  # of its first call, which compiles
    same_texts: int | None = None  # that plain decoding wrote too; None when sampling, which draws other noise
    error: str | None = None  # why there are no numbers; None where there are


def measure_rivals(work: Workload, names: Sequence[str], assistant: str | None) -> Iterator[Rival]:
    """Measure baselines one after the other; one that raises yields a `Rival` with its error.

    Args:
        work: The workload, of which the first `MAX_RIVAL_PROMPTS` prompts are continued.
        names: Which of `RIVALS` to measure.
        assistant: Hub id or directory of the assistant model for `assisted`; None for prompt lookup.
    """
    prompts = [work.prompts[i % len(work.prompts)] for i in range(min(MAX_RIVAL_PROMPTS, work.num_prompts))]
    work.run(prompts[:1], True)
    ours = [work.run([prompt], True) for prompt in prompts]
    plain = [work.run([prompt], False).tokens[0] for prompt in prompts]
    speed = sum(run.count for run in ours) / sum(run.seconds for run in ours)
    for name in names:
        what = name
        try:
            what, arguments = _rival_arguments(work, name, assistant)
            texts, seconds = zip(*_run_rival(work, prompts, name == "static", arguments), strict=True)
            theirs = len(prompts) * work.max_new_tokens / sum(seconds[1:])
            same = None if work.temperature else sum(map(eq, texts[1:], plain))
            yield Rival(name, what, len(prompts), theirs, speed / theirs, seconds[0], same)
        except Exception as error:
            yield Rival(name, what, len(prompts), error=f"{type(error).__name__}: {first_line(error)}")
        if work.device.type == "cuda":
            torch.cuda.empty_cache()


def _rival_arguments(work: Workload, name: str, assistant: str | None) -> tuple[str, dict[str, Any]]:
    """Return a baseline's description and its arguments for `model.generate`."""
    attention = getattr(work.engine.model.config, "_attn_implementation", "eager")
    if name == "eager":
        return f"model.generate, not compiled, {attention}, growing cache", {}
    if name == "static":
        compiled = "compiled" if work.device.type == "cuda" else "not compiled on a CPU"
        return f"model.generate, static cache, {compiled}", {"cache_implementation": "static"}
    if assistant is None:
        return f"assisted generation, prompt lookup of {LOOKUP_TOKENS} tokens", {
            "prompt_lookup_num_tokens": LOOKUP_TOKENS
        }
    model: Any = AutoModelForCausalLM.from_pretrained(assistant, dtype=work.engine.target.dtype)
    model = model.to(work.device).eval()
    model.generation_config.eos_token_id = None
    return f"assisted generation, {assistant}", {"assistant_model": model}


def _run_rival(
    work: Workload, prompts: Prompts, static: bool, arguments: dict[str, Any]
) -> Iterator[tuple[list[int], float]]:
    """Yield text and seconds of each prompt alone, after a first call that is timed apart because it compiles."""
    ids, mask = padded(prompts, work.pad_token)
    for index in (0, *range(len(prompts))):
        # A static cache is compiled for its length: with prompts padded to one length, it is compiled once.
        begin = 0 if static else int(mask.shape[1] - mask[index].sum())
        prompt_ids, prompt_mask = (x[index : index + 1, begin:].to(work.device) for x in (ids, mask))
        torch.manual_seed(work.seed)
        with Stopwatch(work.device) as watch:
            out = work.engine.model.generate(prompt_ids, attention_mask=prompt_mask, **work.arguments(), **arguments)
        text = out[0, prompt_ids.shape[1] :].tolist()
        if len(text) != work.max_new_tokens:
            raise RuntimeError(f"it wrote {len(text)} tokens, not {work.max_new_tokens}")
        yield text, watch.seconds
