"""The report on servers under load: a row for each concurrency and server, and whether their texts are equal."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from redrafter.bench.latencies import LoadSummary, Percentiles, summarize
from redrafter.bench.server_load import Load, LoadRun, Server, run_load
from redrafter.measure.report import Report, Table

__all__ = ["LoadPlan", "run_server_suite"]

BUSY_CLIENT = 0.8  # share of processor time from which on the client limits what is measured
MIN_REQUESTS_PER_SLOT = 4

COLUMNS = [("server", 6), ("at once", 7), ("tok/s", 8), ("steady", 8), ("req/s", 7)]
COLUMNS += [("first p50", 9), ("p99", 7), ("gap p50", 7), ("p99", 7), ("per token", 9), ("all p50", 8), ("p99", 8)]
COLUMNS += [("failed", 6), ("tokens in", 9), ("out", 7), ("same texts", 10), ("client", 6)]


@dataclass(frozen=True)
class LoadPlan:
    """The requests that servers are sent.

    Attributes:
        load: The requests.
        concurrencies: Numbers of requests in flight.
        num_requests: Requests of each; None for `num_prompts`, or for `MIN_REQUESTS_PER_SLOT` a slot if that is more.
        num_prompts: Fewest requests of each, where `num_requests` is None.
    """

    load: Load
    concurrencies: Sequence[int]
    num_requests: int | None
    num_prompts: int

    def requests(self, concurrency: int) -> int:
        """Return how many requests to send at a concurrency."""
        return self.num_requests or max(self.num_prompts, MIN_REQUESTS_PER_SLOT * concurrency)


def run_server_suite(report: Report, servers: Sequence[Server], plan: LoadPlan) -> None:
    """Measure all servers at each concurrency, and add what they do to the report."""
    table = report.table("load on servers; times in ms", COLUMNS)
    reference: dict[int, str] | None = None
    for concurrency in plan.concurrencies:
        for number, server in enumerate(servers, start=1):
            name = f"server {number} ({server.address.url}), {concurrency} at once"
            with report.section(name):
                run = asyncio.run(run_load(server, plan.load, concurrency, plan.requests(concurrency)))
                if reference is None:
                    reference = _first_texts(run, plan.load)
                equal, compared = _equal_texts(run, plan.load, reference)
                summary = summarize(run, plan.load.max_new_tokens)
                report.add(
                    "loads", {"server": number, **asdict(summary), "equal_texts": equal, "compared_texts": compared}
                )
                _add_row(table, number, summary, f"{equal}/{compared}")
                _add_notes(report, name, summary, plan.load.max_new_tokens)


def _first_texts(run: LoadRun, load: Load) -> dict[int, str]:
    """Return the first text of each key of `Load.text_key`."""
    texts: dict[int, str] = {}
    for completion in run.answered:
        texts.setdefault(load.text_key(completion.index), completion.text)
    return texts


def _equal_texts(run: LoadRun, load: Load, reference: Mapping[int, str]) -> tuple[int, int]:
    """Return how many texts equal those of the reference, of how many that it has."""
    known = [completion for completion in run.answered if load.text_key(completion.index) in reference]
    return sum(completion.text == reference[load.text_key(completion.index)] for completion in known), len(known)


def _add_row(table: Table, number: int, summary: LoadSummary, equal: str) -> None:
    table.row(
        number,
        summary.concurrency,
        summary.tokens_per_second,
        summary.steady_tokens_per_second,
        summary.requests_per_second,
        *_pair(summary.first_token_ms),
        *_pair(summary.chunk_gap_ms),
        summary.ms_per_token,
        *_pair(summary.request_ms),
        summary.failed,
        summary.prompt_tokens,
        summary.completion_tokens,
        equal,
        f"{summary.client_cpu_share:.2f}",
    )


def _pair(times: Percentiles | None) -> tuple[float | None, float | None]:
    return (None, None) if times is None else (times.p50, times.p99)


def _add_notes(report: Report, name: str, summary: LoadSummary, max_new_tokens: int) -> None:
    """Print what the reader of a row must know beside it; failed requests are also an error of the report."""
    if summary.failed:
        message = f"{summary.failed} of {summary.requests} requests failed; the first: {summary.first_error}"
        report.line(f"  {message}")
        report.add_error(name, message)
    if summary.short_texts:
        report.line(
            f"  {summary.short_texts} texts have fewer than {max_new_tokens} tokens: the server's context ends there, "
            "or it takes no ignore_eos"
        )
    if summary.client_cpu_share > BUSY_CLIENT:
        report.line(f"  the client limits this: it was busy for {summary.client_cpu_share:.0%} of the time")
