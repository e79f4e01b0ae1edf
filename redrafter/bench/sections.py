"""Run the sections of `redrafter bench` in order; an exception ends only its own section."""

from pathlib import Path

from redrafter.bench.options import BenchOptions
from redrafter.bench.plot import draw
from redrafter.bench.speedup import (
    Speedup,
    describe_equality,
    measure_rivals,
    measure_speedup,
    measure_steady_state,
)
from redrafter.bench.standing_batch import StepParts, measure_head, measure_parts, random_drafter
from redrafter.measure.floors import Bandwidth, copy_bandwidth
from redrafter.measure.report import Report
from redrafter.measure.run import Workload

SPEEDUP_COLUMNS = [("batch", 6), ("plain tok/s", 12), ("spec tok/s", 11), ("ratio", 6), ("nodes", 6), ("tok/step", 9)]
SPEEDUP_COLUMNS += [(f"{name} {way}", 12) for name in ("ttft ms", "tpot ms") for way in ("plain", "spec")]
SPEEDUP_COLUMNS += [("equal", 12)]
WAVES_COLUMNS = [("rows", 6), ("prompts", 8), ("plain tok/s", 12), ("steady", 8), ("spec tok/s", 11), ("steady", 8)]
WAVES_COLUMNS += [("ratio", 6), ("tok/step", 9)]
PARTS_COLUMNS = [("batch", 6), ("context", 9), ("way", 12), ("step ms", 8), ("draft", 8), ("floor", 8), ("x", 6)]
PARTS_COLUMNS += [("verify", 8), ("floor", 8), ("x", 6), ("rest", 8), ("host gap", 9)]
HEADS_COLUMNS = [("batch", 6), ("ids", 9), ("draft ms", 9), ("floor", 8), ("x", 6)]
RIVALS_COLUMNS = [("rival", 10), ("tok/s", 9), ("ours over it", 13), ("same texts", 11), ("first call s", 13)]


def run_sections(report: Report, work: Workload, options: BenchOptions) -> None:
    """Run the measurements selected by the options, section by section, and add them to the report."""
    bandwidth: Bandwidth | None = None
    with report.section("copy bandwidth"):
        bandwidth = copy_bandwidth(work.device)
        report.document["bandwidth"] = vars(bandwidth)
        speed, size = bandwidth.bytes_per_second / 1e9, bandwidth.buffer_bytes / 2**20
        report.line(f"copy bandwidth, measured: {speed:.1f} GB/s read and written (a buffer of {size:.0f} MiB)")
    speedups = _speedups(report, work, options)
    if options.waves is not None:
        _steady_states(report, work, options, options.waves)
    if bandwidth is not None:
        _parts(report, work, options, bandwidth, speedups)
        table = report.table("drafting with random heads of several sizes, in ms", HEADS_COLUMNS)
        for ids in options.draft_vocab_sizes:
            with report.section(f"a draft vocabulary of {ids}"):
                drafter = random_drafter(work.engine.drafter, ids)
                drafter.prepare(work.engine.target)
                for rows in options.batch_sizes:
                    if head := measure_head(work, bandwidth, rows, drafter):
                        report.add("heads", head)
                        table(rows, ids, *_over(head["draft_ms"], head["floor_ms"]))
    if options.against:
        table = report.table("Hugging Face's generate at batch 1, on the first prompts", RIVALS_COLUMNS)
        with report.section("rivals"):
            for rival in measure_rivals(work, options.against, options.assistant_model):
                report.add("rivals", rival)
                same = None if rival["same_texts"] is None else f"{rival['same_texts']} of {rival['prompts']}"
                table(rival["name"], rival["tokens_per_second"], rival["speedup"], same, rival["first_request_s"])
                report.line(f"  {rival['what']}" + (f"; failed: {rival['error']}" if rival["error"] else ""))
                report.progress(f"rival {rival['name']} done")
    if options.plots is not None:
        with report.section("plots"):
            report.document["plots"] = [str(path) for path in draw(report.document, Path(options.plots))]
            report.line("\nplots: " + ", ".join(report.document["plots"]))


def _speedups(report: Report, work: Workload, options: BenchOptions) -> dict[int, Speedup]:
    table = report.table(f"plain and speculative decoding in turn, median of {options.repeats}", SPEEDUP_COLUMNS)
    speedups: dict[int, Speedup] = {}
    for rows in options.batch_sizes:
        with report.section(f"batch {rows}"):
            result = speedups[rows] = measure_speedup(work, rows, options.repeats)
            report.add("batches", result)
            plain, fast, equality = result["plain"], result["speculative"], result["equality"]
            table(
                rows,
                plain["tokens_per_second"],
                fast["tokens_per_second"],
                result["speedup"],
                "off" if result["shape"] is None else result["shape"]["nodes"],
                result["tokens_per_step"],
                *(plain["ttft_ms"], fast["ttft_ms"], plain["tpot_ms"], fast["tpot_ms"]),
                "yes" if equality["equal"] else f"no, {equality['divergent']}/{equality['rows']}",
            )
    for rows, result in speedups.items():
        depths = " ".join(f"{share:.2f}" for share in result["accepted_by_depth"]) or "speculation is off"
        plain_s, fast_s = (speed["first_request_s"] for speed in (result["plain"], result["speculative"]))
        report.line(
            f"batch {rows}: share of steps that accept 1, 2, ... drafts: {depths}; first request {plain_s:.2f} s "
            f"plain, {fast_s:.2f} s speculative"
        )
        report.line(*describe_equality(result["equality"]))
        if result["memory"] is not None:
            memory, gib = result["memory"], 2**30
            report.line(
                f"  peak memory: {memory['weights'] / gib:.2f} GiB weights, {memory['pools'] / gib:.2f} GiB pools of "
                f"keys and values, {memory['beyond'] / gib:.3f} GiB beyond them ({memory['reserved'] / gib:.3f} GiB "
                "reserved)"
            )
    return speedups


def _steady_states(report: Report, work: Workload, options: BenchOptions, waves: int) -> None:
    table = report.table(f"one call with {waves} times as many prompts as rows", WAVES_COLUMNS)
    for rows in options.batch_sizes:
        with report.section(f"{waves} waves of {rows}"):
            result = measure_steady_state(work, rows, waves)
            report.add("steady_states", result)
            plain, fast = result["plain"], result["speculative"]
            speeds = [x for way in (plain, fast) for x in (way["tokens_per_second"], way["steady_tokens_per_second"])]
            ratio = fast["tokens_per_second"] / plain["tokens_per_second"]
            table(rows, result["prompts"], *speeds, ratio, fast["tokens_per_step"])
    report.line("steady: from when all rows have begun until the last text begins")


def _parts(
    report: Report, work: Workload, options: BenchOptions, bandwidth: Bandwidth, speedups: dict[int, Speedup]
) -> None:
    table = report.table("one step in ms, and its floors: bytes over copy bandwidth", PARTS_COLUMNS)
    measured: list[StepParts] = []
    for asked in (None, *options.context):
        for rows in options.batch_sizes:
            # Tuning may turn speculation off at this batch size, and the two ways are the same step.
            speculative = work.proposer(rows, True) is not work.proposer(rows, False)
            for speculate in (False, True) if speculative else (False,):
                way = "speculative" if speculate else "plain"
                with report.section(f"parts of a {way} step, batch {rows}, context {asked or 'of the prompts'}"):
                    parts = measure_parts(work, bandwidth, rows, asked, speculate=speculate)
                    # Only the prompts' own context was timed end to end.
                    if asked is None and rows in speedups:
                        speed = speedups[rows]["speculative"] if speculate else speedups[rows]["plain"]
                        parts["host_gap_ms"] = speed["step_wall_ms"] - parts["step_ms"]
                    report.add("parts", parts)
                    draft = _over(parts["draft_ms"], parts["draft_floor_ms"])
                    verify = _over(parts["verify_ms"], parts["verify_floor_ms"])
                    context = f"{parts['context']}{'*' if parts['beyond'] else ''}"
                    table(rows, context, way, parts["step_ms"], *draft, *verify, parts["rest_ms"], parts["host_gap_ms"])
                    measured.append(parts)
    if any(parts["beyond"] for parts in measured):
        report.line("* beyond the model's context: only times are valid")
    if options.context:
        report.line(
            "contexts are the prompts' texts one after the other, over and over, each row from another token on"
        )
    if checks := [parts["checks"] for parts in measured if parts["checks"] is not None]:
        waits = sorted({check["waited"] for check in checks if check["waited"] is not None})
        allocations, steps = sum(each["allocations"] for each in checks), sum(each["steps"] for each in checks)
        report.line(
            f"a step's launch waits for the GPU: {'; '.join(waits) or 'never'}; "
            f"new pieces of GPU memory in {steps} steps: {allocations}"
        )


def _over(ms: float | None, floor: float | None) -> tuple[float | None, float | None, float | None]:
    return ms, floor, None if ms is None or not floor else ms / floor
