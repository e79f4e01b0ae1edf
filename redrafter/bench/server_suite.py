"""Servers under load: throughput, percentiles of what users wait for, and whether the servers' texts are equal."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from redrafter.bench.server_load import Completion, Load, LoadRun, Server, run_load
from redrafter.measure.report import Report

__all__ = [
    "LoadSummary",
    "Percentiles",
    "percentile",
    "run_server_suite",
    "steady_span",
    "summarize",
    "tokens_between",
]

BUSY_CLIENT = 0.8  # share of processor time from which on the client limits what is measured
COLUMNS = [("server", 6), ("at once", 7), ("tok/s", 8), ("steady", 8), ("req/s", 7)]
COLUMNS += [("first p50", 9), ("p99", 7), ("gap p50", 7), ("p99", 7), ("per token", 9), ("all p50", 8), ("p99", 8)]
COLUMNS += [("failed", 6), ("tokens in", 9), ("out", 7), ("same texts", 10), ("client", 6)]


@dataclass(frozen=True)
class Percentiles:
    """The median and the 99th percentile of times, in milliseconds."""

    p50: float
    p99: float


@dataclass(frozen=True)
class LoadSummary:
    """The speed and the waits of a server's users at one concurrency. Failed requests count under `failed` only.

    Attributes:
        concurrency: Requests in flight.
        requests: Requests that were sent.
        failed: Requests that failed.
        first_error: Why the first of them failed; None where none did.
        seconds: From the first request to the end of the last.
        tokens_per_second: Tokens of all completions by `seconds`.
        steady_tokens_per_second: Tokens per second while all slots are busy (see `steady_span`); None without such a
            time.
        requests_per_second: Completions by `seconds`.
        first_token_ms: From sending a request to the first text; None where all failed, like the next three.
        chunk_gap_ms: Between one chunk with text and the next of the same completion; a chunk may hold several tokens.
        ms_per_token: From a completion's first chunk to its last, by its tokens after the first; mean of all tokens.
        request_ms: From sending a request to the end of its answer.
        prompt_tokens: Tokens of all prompts, by the server's count.
        completion_tokens: Tokens of all completions, by the server's count.
        tokens_per_chunk: Tokens of all completions by their chunks; None where all failed.
        short_texts: Completions of fewer tokens than were asked for.
        client_cpu_share: Processor time of the client, by the time that passed.
    """

    concurrency: int
    requests: int
    failed: int
    first_error: str | None
    seconds: float
    tokens_per_second: float
    steady_tokens_per_second: float | None
    requests_per_second: float
    first_token_ms: Percentiles | None
    chunk_gap_ms: Percentiles | None
    ms_per_token: float | None
    request_ms: Percentiles | None
    prompt_tokens: int
    completion_tokens: int
    tokens_per_chunk: float | None
    short_texts: int
    client_cpu_share: float


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile of values, on the line between the two next to it.

    Args:
        values: One value or more, in any order.
        share: The share of values below it, from 0 to 1.
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def steady_span(completions: Sequence[Completion], concurrency: int) -> tuple[float, float] | None:
    """Return from when until when every slot is busy; None where there is no such time.

    It begins once each of the first `concurrency` requests has its first chunk (or has failed), and ends when a request
    ends and none is left to follow it.

    Args:
        completions: All requests, in any order.
        concurrency: Requests in flight.
    """
    if len(completions) < concurrency:
        return None
    first = sorted(completions, key=lambda completion: completion.index)[:concurrency]
    begin = max(completion.chunk_times[0] if completion.chunk_times else completion.ended for completion in first)
    end = sorted(completion.ended for completion in completions)[len(completions) - concurrency]
    return (begin, end) if begin < end else None


def tokens_between(completions: Sequence[Completion], begin: float, end: float) -> float:
    """Return how many tokens came after `begin` and until `end`; a completion's are spread evenly on its chunks."""
    total = 0.0
    for completion in completions:
        times = completion.chunk_times
        inside = sum(begin < time <= end for time in times)
        total += completion.completion_tokens * inside / max(len(times), 1)
    return total


def summarize(run: LoadRun, max_new_tokens: int) -> LoadSummary:
    """Return the numbers of a load.

    Args:
        run: The requests.
        max_new_tokens: Tokens that each asked for.
    """
    answered, seconds = run.answered, run.ended - run.began
    errors = [completion.error for completion in run.completions if completion.error is not None]
    tokens = sum(completion.completion_tokens for completion in answered)
    span = steady_span(run.completions, run.concurrency)
    chunks = sum(len(completion.chunk_times) for completion in answered)
    return LoadSummary(
        concurrency=run.concurrency,
        requests=len(run.completions),
        failed=len(errors),
        first_error=errors[0] if errors else None,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        steady_tokens_per_second=None if span is None else tokens_between(answered, *span) / (span[1] - span[0]),
        requests_per_second=len(answered) / seconds,
        first_token_ms=_percentiles([_shown(completion)[0] - completion.sent for completion in answered]),
        chunk_gap_ms=_percentiles([b - a for completion in answered for a, b in pairwise(_shown(completion))]),
        ms_per_token=_ms_per_token(answered),
        request_ms=_percentiles([completion.ended - completion.sent for completion in answered]),
        prompt_tokens=sum(completion.prompt_tokens for completion in answered),
        completion_tokens=tokens,
        tokens_per_chunk=tokens / chunks if chunks else None,
        short_texts=sum(completion.completion_tokens < max_new_tokens for completion in answered),
        client_cpu_share=run.client_cpu_share,
    )


def _shown(completion: Completion) -> Sequence[float]:
    """Return when a completion showed something new; one without any text shows that only when it ends."""
    return completion.text_times or [completion.ended]


def _percentiles(seconds: Sequence[float]) -> Percentiles | None:
    if not seconds:
        return None
    return Percentiles(1e3 * percentile(seconds, 0.5), 1e3 * percentile(seconds, 0.99))


def _ms_per_token(completions: Sequence[Completion]) -> float | None:
    seconds = sum(completion.chunk_times[-1] - completion.chunk_times[0] for completion in completions)
    tokens = sum(completion.completion_tokens - 1 for completion in completions)
    return 1e3 * seconds / tokens if tokens else None


def run_server_suite(report: Report, servers: Sequence[Server], load: Load, num_requests: Mapping[int, int]) -> None:
    """Measure all servers at each concurrency, and add what they do to the report.

    Args:
        report: The report.
        servers: The servers; texts are compared with those of the first.
        load: The requests that they are sent.
        num_requests: From numbers of requests in flight to the requests to send.
    """
    table = report.table("load on servers; times in ms", COLUMNS)
    reference: dict[int, str] = {}  # first text of each key of `Load.text_key`, from the first run that succeeds
    for concurrency, count in num_requests.items():
        for number, server in enumerate(servers, start=1):
            name = f"server {number} ({server.address.url}), {concurrency} at once"
            with report.section(name):
                run = asyncio.run(run_load(server, load, concurrency, count))
                texts = [(load.text_key(each.index), each.text) for each in run.answered]
                reference = reference or dict(reversed(texts))
                same = [text == reference[key] for key, text in texts if key in reference]
                summary = summarize(run, load.max_new_tokens)
                found = {"server": number, **asdict(summary), "equal_texts": sum(same), "compared_texts": len(same)}
                report.add("loads", found)
                table.row(
                    number,
                    concurrency,
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
                    f"{sum(same)}/{len(same)}",
                    f"{summary.client_cpu_share:.2f}",
                )
                _add_notes(report, name, summary, load.max_new_tokens)


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
