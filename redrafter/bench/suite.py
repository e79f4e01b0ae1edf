"""The sections of a benchmark, one after the other; each stands alone, so that one that fails costs only itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from redrafter.bench.plot import draw
from redrafter.bench.rivals import measure_rivals
from redrafter.bench.speedup import Throughput, measure
from redrafter.bench.step_parts import Parts, measure_head, measure_parts, random_drafter
from redrafter.measure.bandwidth import Bandwidth, copy_bandwidth
from redrafter.measure.report import Report, Table
from redrafter.measure.workload import Workload

__all__ = ["Plan", "run_suite"]

SWEEP = [("batch", 6), ("plain tok/s", 12), ("spec tok/s", 11), ("ratio", 6), ("nodes", 6), ("tok/step", 9)]
SWEEP += [(f"{name} {way}", 12) for name in ("ttft ms", "tpot ms") for way in ("plain", "spec")] + [("equal", 12)]
PARTS = [("batch", 6), ("context", 9), ("way", 12), ("step ms", 8), ("draft", 8), ("floor", 8), ("x", 6)]
PARTS += [("verify", 8), ("floor", 8), ("x", 6), ("rest", 8), ("host gap", 9)]
HEADS = [("batch", 6), ("ids", 9), ("draft ms", 9), ("floor", 8), ("x", 6)]
RIVALS = [("rival", 10), ("tok/s", 9), ("ours over it", 13), ("same texts", 11), ("first call s", 13)]


@dataclass(frozen=True)
class Plan:
    """What to measure beside the batch sizes; what is empty is left out."""

    batch_sizes: Sequence[int]
    repeats: int
    contexts: Sequence[int] = ()
    draft_vocab_sizes: Sequence[int] = ()
    rivals: Sequence[str] = ()
    assistant: str | None = None
    plots: Path | None = None


def run_suite(report: Report, work: Workload, plan: Plan) -> None:
    bandwidth: Bandwidth | None = None
    with report.section("copy bandwidth"):
        bandwidth = copy_bandwidth(work.device)
        report.document["bandwidth"] = vars(bandwidth)
        speed, size = bandwidth.bytes_per_second / 1e9, bandwidth.buffer_bytes / 2**20
        report.line(f"copy bandwidth, measured: {speed:.1f} GB/s read and written (a buffer of {size:.0f} MiB)")
    found = _sweep(report, work, plan)
    if bandwidth is not None:
        _parts(report, work, plan, bandwidth, found)
        _heads(report, work, plan, bandwidth)
    _rivals(report, work, plan)
    if plan.plots is not None:
        with report.section("plots"):
            report.document["plots"] = [str(path) for path in draw(report.document, plan.plots)]
            report.line("\nplots: " + ", ".join(report.document["plots"]))


def _sweep(report: Report, work: Workload, plan: Plan) -> dict[int, Throughput]:
    table = report.table(f"plain and speculative decoding in turn, median of {plan.repeats}", SWEEP)
    found: dict[int, Throughput] = {}
    for rows in plan.batch_sizes:
        with report.section(f"batch {rows}"):
            one = found[rows] = measure(work, rows, plan.repeats)
            report.add("batches", one)
            plain, fast, equality = one.plain, one.speculative, one.equality
            table.row(
                rows,
                plain.tokens_per_second,
                fast.tokens_per_second,
                one.speedup,
                "off" if one.shape is None else one.shape["nodes"],
                one.tokens_per_step,
                *(x for ms in ("ttft_ms", "tpot_ms") for x in (getattr(plain, ms), getattr(fast, ms))),
                "yes" if equality.equal else f"no, {equality.divergent}/{equality.rows}",
            )
    for rows, one in found.items():
        _details(report, rows, one)
    return found


def _details(report: Report, rows: int, one: Throughput) -> None:
    depths = " ".join(f"{share:.2f}" for share in one.accepted_by_depth) or "speculation is off"
    report.line(f"batch {rows}: share of steps that accept 1, 2, ... drafts: {depths}; {_first_requests(one)}")
    first = one.equality.first
    if first is not None:
        margin = ""
        if first.margin is not None:
            largest, which = one.equality.largest_margin, "" if first.top_two else "not "
            margin = (
                f", where the best logit leads by {first.margin:.3g} ({which}these two; most of any: {largest:.3g})"
            )
        report.line(f"  tokens differ first at new token {first.token} of prompt {first.prompt}{margin}")
    if one.memory is not None:
        gib = {name: size / 2**30 for name, size in vars(one.memory).items()}
        report.line(
            "  peak memory: {weights:.2f} GiB weights, {pools:.2f} GiB pools of keys and values, {beyond:.3f} GiB "
            "beyond them ({reserved:.3f} GiB reserved)".format(**gib)
        )


def _first_requests(one: Throughput) -> str:
    plain, fast = one.plain.first_request_s, one.speculative.first_request_s
    return f"first request {plain:.2f} s plain, {fast:.2f} s speculative"


def _parts(report: Report, work: Workload, plan: Plan, bandwidth: Bandwidth, found: dict[int, Throughput]) -> None:
    table = report.table("one step in ms, and its floors: bytes over copy bandwidth", PARTS)
    measured: list[Parts] = []
    for asked in (None, *plan.contexts):
        for rows in plan.batch_sizes:
            speculative = work.proposer(rows, True) is not work.proposer(rows, False)
            for speculate in (False, True) if speculative else (False,):
                way = "speculative" if speculate else "plain"
                with report.section(f"parts of a {way} step, batch {rows}, context {asked or 'of the prompts'}"):
                    one = measure_parts(work, bandwidth, rows, asked, speculate=speculate)
                    gap = None
                    if asked is None and rows in found:
                        gap = (found[rows].speculative if speculate else found[rows].plain).step_wall_ms - one.step_ms
                    report.add("parts", vars(one) | {"host_gap_ms": gap})
                    _part_row(table, one, gap)
                    measured.append(one)
    if any(one.beyond for one in measured):
        report.line("* beyond the model's context: only times mean anything")
    if plan.contexts:
        report.line(
            "contexts are the prompts' texts one after the other, over and over, each row from another token on"
        )
    checks = [one.checks for one in measured if one.checks is not None]
    if checks:
        waits = sorted({check.waited for check in checks if check.waited is not None})
        fresh = sum(check.allocations for check in checks)
        steps = sum(check.steps for check in checks)
        report.line(
            f"a step's launch waits for the GPU: {'; '.join(waits) or 'never'}; "
            f"new pieces of GPU memory in {steps} steps: {fresh}"
        )


def _part_row(table: Table, one: Parts, gap: float | None) -> None:
    draft = (one.draft_ms, one.draft_floor_ms, _over(one.draft_ms, one.draft_floor_ms))
    verify = (one.verify_ms, one.verify_floor_ms, _over(one.verify_ms, one.verify_floor_ms))
    way = "speculative" if one.speculative else "plain"
    context = f"{one.context}{'*' if one.beyond else ''}"
    table.row(one.batch_size, context, way, one.step_ms, *draft, *verify, one.rest_ms, gap)


def _heads(report: Report, work: Workload, plan: Plan, bandwidth: Bandwidth) -> None:
    table = report.table("drafting with a random head of so many ids, in ms", HEADS)
    for ids in plan.draft_vocab_sizes:
        with report.section(f"a draft vocabulary of {ids}"):
            drafter = random_drafter(work.engine.drafter, ids)
            for rows in plan.batch_sizes:
                one = measure_head(work, bandwidth, rows, drafter)
                if one is not None:
                    report.add("heads", one)
                    table.row(rows, ids, one.draft_ms, one.floor_ms, _over(one.draft_ms, one.floor_ms))


def _rivals(report: Report, work: Workload, plan: Plan) -> None:
    if not plan.rivals:
        return
    table = report.table("Hugging Face's generate at batch 1, on the first prompts", RIVALS)
    with report.section("rivals"):
        for one in measure_rivals(work, plan.rivals, plan.assistant):
            report.add("rivals", one)
            same = None if one.same_texts is None else f"{one.same_texts} of {one.prompts}"
            table.row(one.name, one.tokens_per_second, one.speedup, same, one.first_request_s)
            report.line(f"  {one.what}" + (f"; failed: {one.error}" if one.error else ""))
            report.progress(f"rival {one.name} done")


def _over(ms: float | None, floor: float | None) -> float | None:
    return None if ms is None or not floor else ms / floor
