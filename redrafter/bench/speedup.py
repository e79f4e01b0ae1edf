"""Compare the speed of plain and speculative decoding, their tokens and memory, and Hugging Face's `generate`."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

import torch

from redrafter.checkpoints.models import load_model
from redrafter.errors import first_line
from redrafter.measure.differences import find_differences
from redrafter.measure.floors import resident_bytes
from redrafter.measure.run import Arrival, PromptIds, RepeatedRuns, Run, Workload, run_in_turn, transformers_run

MAX_RIVAL_PROMPTS = 4  # prompts that rivals continue, one at a time
LOOKUP_TOKENS = 10  # drafts per step of Hugging Face's prompt lookup


class Speed(TypedDict):
    """The speed of a decoding method, as medians over repeats."""

    first_request_s: float  # of the first call at this batch size, which captures and may compile
    tokens_per_second: float  # of all rows, including prefill
    ttft_ms: float  # from the call to the first token of a batch
    tpot_ms: float  # per token of a row after its first
    steps: int  # of all batches of one repeat
    step_wall_ms: float  # excluding prefill


class FirstDifference(TypedDict):
    """The earliest difference from plain decoding, preferably one that rounding does not explain."""

    prompt: int
    token: int  # index of the new token
    plain: int | None  # id in plain decoding's output
    speculative: int | None  # id in the speculative output
    margin: float | None  # by which the best logit exceeds the second; None when sampling
    top_two: bool | None  # whether these are the two ids
    near_tie: bool


class Equality(TypedDict):
    """The comparison of speculative with plain decoding."""

    equal: bool
    rows: int  # number of compared rows
    divergent: int  # number of rows that differ
    first: FirstDifference | None
    largest_margin: float | None


class Memory(TypedDict):
    """Peak GPU memory in bytes."""

    weights: int  # of model and drafter, including buffers
    pools: int  # paged keys and values
    beyond: int  # other allocated memory
    reserved: int  # memory reserved by torch beyond weights and pools, including captured graphs


class Speedup(TypedDict):
    """An entry of the document's `batches`."""

    batch_size: int
    batches: int  # of one repeat
    tokens: int  # new tokens of one repeat
    shape: Mapping[str, object] | None  # of the tree; None if speculation is off
    plain: Speed
    speculative: Speed
    speedup: float
    tokens_per_step: float  # new tokens of a row
    accepted_by_depth: list[float]  # entry d is the share of steps in which at least d + 1 drafts became output
    memory: Memory | None
    equality: Equality


class SteadySpeed(TypedDict):
    """The speed of one call with more prompts than rows."""

    tokens_per_second: float  # of all sequences, including prefill
    steady_tokens_per_second: float | None
    tokens_per_step: float  # new tokens of a sequence


class SteadyState(TypedDict):
    """An entry of the document's `steady_states`."""

    batch_size: int
    prompts: int
    plain: SteadySpeed
    speculative: SteadySpeed


class Rival(TypedDict):
    """An entry of the document's `rivals`; a failed baseline has an `error` instead of numbers."""

    name: str
    what: str
    prompts: int
    tokens_per_second: float | None
    speedup: float | None  # of speculation over the baseline
    first_request_s: float | None  # includes compilation
    same_texts: int | None
    error: str | None


def measure_speedup(work: Workload, rows: int, repeats: int) -> Speedup:
    """Decode batches of `rows` rows without and with drafts; return an entry of the document's `batches`."""

    def way(speculate: bool) -> Callable[[PromptIds, int], Run]:
        return lambda batch, first: work.run_batch(batch, speculate, seed=first)

    batches = work.batches(rows)
    # The first call of each way is reported separately, and warms up for the timed ones.
    first = [work.run_batch(batches[0], speculate).seconds for speculate in (False, True)]
    if work.device.type == "cuda":
        # After warm-up: compiling and capturing allocate more than steps do.
        torch.cuda.reset_peak_memory_stats(work.device)
    # In turn, so that clock frequency and other load affect both ways alike.
    plain, fast = run_in_turn([way(False), way(True)], batches, repeats, alternate=True)
    stats = fast.stats
    return {
        "batch_size": rows,
        "batches": len(batches),
        "tokens": sum(map(len, fast.texts())),
        "shape": work.proposer(rows, speculate=True).sizes,
        "plain": _speed(plain, first[0], work.max_new_tokens),
        "speculative": _speed(fast, first[1], work.max_new_tokens),
        "speedup": fast.speedup(plain),
        "tokens_per_step": stats.tokens_per_step,
        "accepted_by_depth": [count / stats.steps for count in stats.accepted_by_depth],
        "memory": peak_memory(work),
        "equality": compare_texts(work, plain.texts(), fast.texts()),
    }


def _speed(ran: RepeatedRuns, first_request_s: float, new_tokens: int) -> Speed:
    """Return the speed of repeats whose rows decoded `new_tokens` tokens each, as medians over repeats."""
    rest = [sum(run.seconds - run.first_token for run in runs) for runs in ran.repeats]
    steps = [sum(run.steps for run in runs) for runs in ran.repeats]
    return {
        "first_request_s": first_request_s,
        "tokens_per_second": statistics.median(ran.tokens_per_second),
        "ttft_ms": 1e3 * statistics.median(run.first_token for runs in ran.repeats for run in runs),
        "tpot_ms": 1e3 * statistics.median(rest) / (len(ran.repeats[0]) * (new_tokens - 1)),
        "steps": steps[0],
        "step_wall_ms": 1e3 * statistics.median(r / s for r, s in zip(rest, steps, strict=True)),
    }


def compare_texts(work: Workload, plain: PromptIds, speculative: PromptIds) -> Equality:
    """Compare new tokens by row; row i continues prompt i of the workload, modulo the number of prompts."""
    prompts = [work.prompts[row % len(work.prompts)] for row in range(len(plain))]
    arguments = work.arguments() | {"seed": work.seed}
    differences = find_differences(work.engine, arguments, prompts, plain, [speculative])
    # Differences that rounding cannot explain come first, then the earliest token.
    first = min(differences, key=lambda difference: (difference.near_tie, difference.token), default=None)
    return {
        "equal": not differences,
        "rows": len(plain),
        "divergent": len(differences),
        "first": None
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
        "largest_margin": max((each.lead for each in differences if each.lead is not None), default=None),
    }


def describe_equality(equality: Equality) -> Iterator[str]:
    """Yield a line about the first differing text in the result of `compare_texts`, if any."""
    first, largest = equality["first"], equality["largest_margin"]
    if first is None:
        return
    kind = "a near-tie" if first["near_tie"] else "OTHER TOKENS, which rounding does not explain,"
    lead = ""
    if first["margin"] is not None:
        which = "these two" if first["top_two"] else "not these two"
        lead = f"; the best logit leads by {first['margin']:.3g} ({which}; most of any: {largest:.3g})"
    yield f"  {kind} at new token {first['token']} of prompt {first['prompt']}{lead}"


def peak_memory(work: Workload) -> Memory | None:
    """Return the peak GPU memory since torch's statistics were last reset, in bytes; None on a CPU.

    Keys: `weights`, with buffers, of model and drafter; `pools` of paged keys and values; memory allocated `beyond`
    these; and memory `reserved` by torch beyond these, including captured graphs.
    """
    if work.device.type != "cuda":
        return None
    weights, memory = resident_bytes(work.engine.model, work.engine.drafter), work.engine.memory
    pools = 0 if memory is None else sum(pool.nbytes for pool in memory.store.pools)
    beyond, reserved = torch.cuda.max_memory_allocated(work.device), torch.cuda.max_memory_reserved(work.device)
    known = weights + pools
    return {"weights": weights, "pools": pools, "beyond": beyond - known, "reserved": reserved - known}


def steady_rate(arrivals: Sequence[Arrival], rows: int) -> float | None:
    """Return tokens per second between the starts of sequence number `rows` and of the last; None if they coincide."""
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

    Each way runs once untimed, so that the timed call captures nothing. Returns an entry of the document's
    `steady_states`.
    """
    engine, options = work.engine, work.engine.options
    prompts = [work.prompts[index % len(work.prompts)] for index in range(rows * waves)]

    def measure(speculate: bool) -> SteadySpeed:
        # The first call warms up.
        work.run_batch(prompts, speculate)
        run = work.run_batch(prompts, speculate)
        return {
            "tokens_per_second": run.tokens_per_second,
            "steady_tokens_per_second": steady_rate(run.arrivals, rows),
            "tokens_per_step": run.stats.tokens_per_step,
        }

    engine.options = replace(options, max_batch_size=rows)
    try:
        plain, speculative = measure(False), measure(True)
    finally:
        engine.options = options
    return {"batch_size": rows, "prompts": len(prompts), "plain": plain, "speculative": speculative}


def measure_rivals(work: Workload, names: Sequence[str], assistant: str | None) -> Iterator[Rival]:
    """Measure baselines at batch 1 one after the other: Hugging Face's own `generate`, in the same process.

    Continues the first `MAX_RIVAL_PROMPTS` prompts. `assistant` is a model for `assisted`, or None for prompt lookup.
    Yields entries of the document's `rivals`; a failed baseline has an `error` instead of numbers.
    """
    prompts = [work.prompts[i % len(work.prompts)] for i in range(min(MAX_RIVAL_PROMPTS, work.num_prompts))]
    work.run_batch(prompts[:1], True)
    speed = RepeatedRuns([[work.run_batch([prompt], True) for prompt in prompts]]).tokens_per_second[0]
    plain = [work.run_batch([prompt], False).tokens[0] for prompt in prompts]
    for name in names:
        rival = Rival(
            name=name,
            what=name,
            prompts=len(prompts),
            tokens_per_second=None,
            speedup=None,
            first_request_s=None,
            same_texts=None,
            error=None,
        )
        try:
            rival["what"], arguments = _rival_arguments(work, name, assistant)
            # torch.compile specialises a static cache on its length: pad prompts to one length to compile once.
            arguments["pad"] = (max(map(len, prompts)) if name == "static" else 0, work.pad_token)
            arguments |= work.arguments()
            first, *rest = (
                transformers_run(work.engine.model, prompt, work.seed, **arguments) for prompt in (prompts[0], *prompts)
            )
            if wrong := next((run.count for run in rest if run.count != work.max_new_tokens), None):
                raise RuntimeError(f"it wrote {wrong} tokens, not {work.max_new_tokens}")
            theirs = RepeatedRuns([rest]).tokens_per_second[0]
            rival["tokens_per_second"], rival["speedup"] = theirs, speed / theirs
            rival["first_request_s"] = first.seconds
            if not work.temperature:  # compare greedy texts only; a sampling baseline draws different noise
                rival["same_texts"] = sum(run.tokens[0] == text for run, text in zip(rest, plain, strict=True))
        # A baseline of another library must not end the benchmark.
        except Exception as error:
            rival["error"] = f"{type(error).__name__}: {first_line(error)}"
        yield rival
        # The next baseline may need the memory of this one's cache.
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
    model: Any = load_model(assistant, dtype=work.engine.target.dtype, device=work.device, trust_remote_code=False)
    # Otherwise assisted generation stops drafting at the assistant's end token.
    model.generation_config.eos_token_id = None
    return f"assisted generation, {assistant}", {"assistant_model": model}
