"""Measure servers of OpenAI's protocol under load, with a fixed number of concurrent streams timed chunk by chunk.

Reports throughput, latency percentiles, and whether the servers' texts are equal.
"""

import asyncio
import json
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, TypedDict
from uuid import uuid4

from aiohttp import ClientSession

from redrafter.bench.http_client import RequestFailedError, open_session, request
from redrafter.data.rows import Row
from redrafter.errors import ArgumentError, ReDrafterError
from redrafter.measure.report import Report
from redrafter.scheduler.sequence import Stats

REQUEST_FIELDS = ("role", "content", "name", "reasoning_content", "tool_call_id")  # of a message
BUSY_CLIENT = 0.8  # above this share of processor time the client limits the measurement
COLUMNS = [("server", 6), ("at once", 7), ("tok/s", 8), ("steady", 8), ("req/s", 7)]
COLUMNS += [("first p50", 9), ("p99", 7), ("gap p50", 7), ("p99", 7), ("per token", 9), ("all p50", 8), ("p99", 8)]
COLUMNS += [("failed", 6), ("tokens in", 9), ("out", 7), ("same texts", 10), ("client", 6)]


@dataclass
class Completion:
    """One request and its result; times are from `time.perf_counter`, in seconds."""

    index: int  # number of the request, or of the conversation
    sent: float
    ended: float = 0.0  # when its answer had ended, or failed
    chunk_times: list[float] = field(default_factory=list)  # when each chunk of the stream came
    text_times: list[float] = field(default_factory=list)  # when each chunk came that holds text
    text: str = ""
    prompt_tokens: int = 0  # by the server's count, as the next
    completion_tokens: int = 0
    stats: Stats | None = None  # speculation statistics, if the server reports them
    error: str | None = None  # why the request failed; None if it succeeded
    turn: int = 0  # of a conversation, from 0
    too_long: bool = False  # whether it failed because the prompt does not fit into the model's context

    def note(self, data: bytes, now: float) -> None:
        """Record an event of the stream; raise `RequestFailedError` if it is not a chunk of a completion or a chat."""
        try:
            event = json.loads(data)
            if error := event.get("error"):
                raise RequestFailedError(f"in the stream: {error.get('message') if isinstance(error, dict) else error}")
            if event.get("choices"):
                # Chunks without text count too: they carry tokens of incomplete characters.
                self.chunk_times.append(now)
                choice = event["choices"][0]
                if text := choice.get("text") or choice.get("delta", {}).get("content"):
                    self.text += text  # only a str can be added
                    self.text_times.append(now)
            if usage := event.get("usage"):
                self.prompt_tokens = int(usage["prompt_tokens"])
                self.completion_tokens = int(usage["completion_tokens"])
            if metrics := (event.get("metrics") or {}).get("speculative_decoding"):
                # Entry j counts the steps that accepted exactly j drafts; `accepted_by_depth` counts j or more.
                histogram = metrics["acceptance_histogram"]
                reached = [sum(histogram[depth:]) for depth in range(1, len(histogram))]
                steps, drafted = metrics["num_spec_steps"], metrics["num_draft_tokens"]
                accepted = metrics["num_accepted_draft_tokens"]
                self.stats = Stats(steps, drafted, accepted, emitted=steps + accepted, accepted_by_depth=reached)
        except (ValueError, AttributeError, LookupError, TypeError) as error:
            shown = data[:80].decode(errors="replace")
            raise RequestFailedError(f"an event of the stream is no chunk of a completion: {shown}") from error


class LoadError(ReDrafterError):
    """No request of a load was answered."""


@dataclass(frozen=True)
class ServerUnderTest:
    """A server to be measured."""

    url: str  # without `/v1`
    model: str  # to ask for
    kind: str | None = None  # who owns the model, as the server says, such as `vllm`
    version: str | None = None  # response of `/version`; None if it has no such route
    key: str | None = field(default=None, repr=False)  # API key


class Requests(Protocol):
    """The requests of a load."""

    def route(self, index: int) -> str:
        """Return the path that request `index` is sent to."""

    def exchange(self, index: int, model: str) -> Generator[bytes, Completion, None]:
        """Yield the JSON body of request `index` and of each follow-up; receives the completion of each body."""


@dataclass(frozen=True)
class Load:
    """The requests of a load; request i continues prompt i, or answers chat i, modulo their number.

    Each has a unique `cache_salt`. Otherwise, for a repeated prompt a server would reuse keys and values, and a server
    of this library would copy drafts from its earlier answers.
    """

    prompts: Sequence[str | dict[str, Any]]  # texts, and fields of chats' requests (`chat_fields`)
    max_new_tokens: int  # of each completion; no end token ends one early
    temperature: float  # 0 for greedy decoding
    seed: int  # of request 0; request i has this plus i

    def route(self, index: int) -> str:
        """Return the path that request `index` is sent to."""
        # Servers apply the chat template to messages; texts bypass it.
        is_text = isinstance(self.prompts[index % len(self.prompts)], str)
        return "/v1/completions" if is_text else "/v1/chat/completions"

    def exchange(self, index: int, model: str) -> Generator[bytes, Completion, None]:
        """Yield the JSON body of request `index`, which has no follow-up."""
        prompt = self.prompts[index % len(self.prompts)]
        body = {"prompt": prompt} if isinstance(prompt, str) else prompt
        body = body | {
            "model": model,
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "seed": self.seed + index,
            # Texts of equal length make servers comparable.
            "ignore_eos": True,
            # Prompts repeat, so a server's prefix cache would skip their prefill.
            "cache_salt": uuid4().hex,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        yield json.dumps(body).encode()

    def text_key(self, index: int) -> int:
        """Return a key that two requests share if and only if they should produce the same text."""
        return index if self.temperature else index % len(self.prompts)


def chat_fields(row: Row, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of a request for the answer to some messages of a row, with its tools and variables."""
    fields = {"messages": list(map(_request_message, messages))}
    more = {"tools": row.tools, "chat_template_kwargs": row.template_kwargs}
    return fields | {name: value for name, value in more.items() if value is not None}


def _request_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as a request has it: no other keys, and arguments of calls as JSON text."""
    sent = {name: message[name] for name in REQUEST_FIELDS if name in message}
    if calls := message.get("tool_calls"):
        functions = [call["function"] for call in calls]
        texts = [
            arguments if isinstance(arguments := f["arguments"], str) else json.dumps(arguments) for f in functions
        ]
        sent["tool_calls"] = [
            {"id": f"call_{number}"} | call | {"function": function | {"arguments": text}}
            for number, (call, function, text) in enumerate(zip(calls, functions, texts, strict=True))
        ]
    return sent


class Percentiles(TypedDict):
    """Percentiles of a latency in milliseconds."""

    p50: float
    p99: float


class LoadSummary(TypedDict):
    """Throughput and latencies of a load; times are None if all requests failed."""

    concurrency: int
    requests: int
    failed: int
    first_error: str | None
    seconds: float
    tokens_per_second: float
    steady_tokens_per_second: float | None
    requests_per_second: float
    first_token_ms: Percentiles | None  # from sending a request to its first text
    chunk_gap_ms: Percentiles | None  # between chunks with text, which may hold several tokens
    ms_per_token: float | None  # the mean
    request_ms: Percentiles | None
    prompt_tokens: int  # by the server's count
    completion_tokens: int  # by the server's count
    tokens_per_chunk: float | None
    short_texts: int
    client_cpu_share: float


@dataclass(frozen=True)
class LoadRun:
    """The requests of one load on one server."""

    concurrency: int  # requests in flight
    completions: list[Completion]  # in the order in which they ended
    began: float  # when the first was sent
    ended: float  # when the last had ended
    client_cpu_share: float  # processor time of this process in this interval, divided by its length

    @property
    def answered(self) -> list[Completion]:
        """Requests that did not fail."""
        return [completion for completion in self.completions if completion.error is None]


async def find_server(url: str, model: str | None, key: str | None) -> ServerUnderTest:
    """Query a server's model and version; raise `ArgumentError` if it lists no model.

    With `model` None, the first listed model is used.
    """
    async with open_session(key) as session:
        try:
            async with request(session, "GET", f"{url}/v1/models") as response:
                first = json.loads(await response.read())["data"][0]
            name = model or str(first["id"])
        except RequestFailedError as error:
            hint = "; give --api-key" if str(error).startswith("HTTP 401") else ""
            raise ArgumentError(f"--url {url}: GET /v1/models: {error}{hint}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise ArgumentError(f"--url {url}: /v1/models lists no model: is it OpenAI's protocol?") from error
        try:
            async with request(session, "GET", f"{url}/version") as response:
                version = json.loads(await response.read()).get("version")
        except (RequestFailedError, AttributeError):
            version = None  # OpenAI's protocol has no such route
        return ServerUnderTest(url, name, first.get("owned_by"), version, key)


async def run_load(
    server: ServerUnderTest, load: Requests, concurrency: int, num_requests: int, *, warm_up: bool = True
) -> LoadRun:
    """Keep `concurrency` requests in flight until `num_requests` have ended, after one untimed request per slot.

    A request counts together with its follow-ups. Without `warm_up` no untimed requests are sent.

    Raises:
        LoadError: All warm-up requests failed.
    """

    async def drive(count: int) -> list[Completion]:
        completions: list[Completion] = []
        indices = iter(range(count))  # shared by all slots: each takes the next index once its request has ended

        async def fill_slot() -> None:
            for index in indices:
                exchange = load.exchange(index, server.model)
                with suppress(StopIteration):
                    body = next(exchange)
                    while True:
                        completion = await _complete(session, server.url + load.route(index), index, body)
                        completions.append(completion)
                        body = exchange.send(completion)

        await asyncio.gather(*(fill_slot() for _ in range(concurrency)))
        return completions

    async with open_session(server.key) as session:
        first = await drive(concurrency) if warm_up else []
        # Long prompts may fail at the warm-up and are no reason to stop.
        if first and all(completion.error and not completion.too_long for completion in first):
            raise LoadError(f"no request was answered; the first: {first[0].error}")
        # After warm-up, so that neither connections nor first-request work is timed.
        began, cpu_began = time.perf_counter(), time.process_time()
        completions = await drive(num_requests)
        ended = time.perf_counter()
        return LoadRun(concurrency, completions, began, ended, (time.process_time() - cpu_began) / (ended - began))


async def _complete(session: ClientSession, url: str, index: int, body: bytes) -> Completion:
    """Send one request and time its stream; failures are recorded, not raised."""
    # Many requests start at once and wait for their turn in this process: the session records when one is sent.
    completion, done = Completion(index, time.perf_counter()), False
    try:
        async with request(session, "POST", url, data=body, trace_request_ctx=completion) as response:
            async for line in response.content:  # each `data:` line is one event on all such servers
                if line.startswith(b"data:"):
                    if (data := line[5:].strip()) == b"[DONE]":
                        done = True
                    else:
                        completion.note(data, time.perf_counter())
        if not done:
            raise RequestFailedError("the stream ended without [DONE]")
        if not completion.completion_tokens or not completion.chunk_times:
            raise RequestFailedError("the stream has no token usage, although stream_options.include_usage is set")
    except RequestFailedError as error:
        completion.error = str(error)
        # Not all servers send OpenAI's code; the others describe it in the message.
        completion.too_long = error.code == "context_length_exceeded" or (
            completion.error.startswith("HTTP 400") and "context" in completion.error
        )
    completion.ended = time.perf_counter()
    return completion


def percentile(values: Sequence[float], share: float) -> float:
    """Return the quantile `share` of one or more values, with linear interpolation."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def steady_span(completions: Sequence[Completion], concurrency: int) -> tuple[float, float] | None:
    """Return start and end of the interval in which all `concurrency` slots are busy; None if there is none.

    It starts once each of the first `concurrency` requests has its first chunk (or has failed), and ends when a request
    ends without a successor.
    """
    if len(completions) < concurrency:
        return None
    first = sorted(completions, key=lambda completion: completion.index)[:concurrency]
    begin = max([*completion.chunk_times, completion.ended][0] for completion in first)
    end = sorted(completion.ended for completion in completions)[-concurrency]
    return (begin, end) if begin < end else None


def tokens_between(completions: Sequence[Completion], begin: float, end: float) -> float:
    """Count the tokens received from `begin` to `end`; a completion's tokens are spread evenly over its chunks."""
    shares = (sum(begin < at <= end for at in one.chunk_times) / max(len(one.chunk_times), 1) for one in completions)
    return sum(one.completion_tokens * share for one, share in zip(completions, shares, strict=True))


def _percentiles(seconds: Sequence[float]) -> Percentiles | None:
    return {"p50": 1e3 * percentile(seconds, 0.5), "p99": 1e3 * percentile(seconds, 0.99)} if seconds else None


def _cells(times: Percentiles | None) -> tuple[float | None, float | None]:
    return (None, None) if times is None else (times["p50"], times["p99"])


def summarize(run: LoadRun, max_new_tokens: int) -> LoadSummary:
    """Return throughput and latencies of requests for `max_new_tokens` tokens each.

    Failed requests count under `failed` only. If all failed, times are None.
    """
    answered, seconds = run.answered, run.ended - run.began
    errors = [completion.error for completion in run.completions if completion.error]
    tokens = sum(completion.completion_tokens for completion in answered)
    span = steady_span(run.completions, run.concurrency)
    chunks = sum(len(completion.chunk_times) for completion in answered)
    # When users see new text. A completion without text becomes visible only when it ends.
    shown = [completion.text_times or [completion.ended] for completion in answered]
    streaming = sum(completion.chunk_times[-1] - completion.chunk_times[0] for completion in answered)
    following = tokens - len(answered)  # tokens after each completion's first
    return {
        "concurrency": run.concurrency,
        "requests": len(run.completions),
        "failed": len(errors),
        "first_error": errors[0] if errors else None,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "steady_tokens_per_second": None if span is None else tokens_between(answered, *span) / (span[1] - span[0]),
        "requests_per_second": len(answered) / seconds,
        "first_token_ms": _percentiles([times[0] - one.sent for times, one in zip(shown, answered, strict=True)]),
        "chunk_gap_ms": _percentiles([b - a for times in shown for a, b in pairwise(times)]),
        "ms_per_token": 1e3 * streaming / following if following else None,
        "request_ms": _percentiles([completion.ended - completion.sent for completion in answered]),
        "prompt_tokens": sum(completion.prompt_tokens for completion in answered),
        "completion_tokens": tokens,
        "tokens_per_chunk": tokens / chunks if chunks else None,
        "short_texts": sum(completion.completion_tokens < max_new_tokens for completion in answered),
        "client_cpu_share": run.client_cpu_share,
    }


def run_server_loads(
    report: Report, servers: Sequence[ServerUnderTest], load: Load, num_requests: Mapping[int, int]
) -> None:
    """Measure all servers at each concurrency, report the results, and compare texts with the first server's.

    `num_requests` maps the number of requests in flight to the number of requests.
    """
    table = report.table("load on servers; times in ms", COLUMNS)
    reference: dict[int, str] = {}  # first text of each key of `Load.text_key`, from the first run that succeeds
    for concurrency, count in num_requests.items():
        for number, server in enumerate(servers, start=1):
            name = f"server {number} ({server.url}), {concurrency} at once"
            with report.section(name):
                run = asyncio.run(run_load(server, load, concurrency, count))
                texts = [(load.text_key(each.index), each.text) for each in run.answered]
                reference = reference or dict(reversed(texts))
                # A load with more requests than the first one has texts without a reference.
                same = [text == reference[key] for key, text in texts if key in reference]
                summary = summarize(run, load.max_new_tokens)
                same_texts = {"equal_texts": sum(same), "compared_texts": len(same)}
                report.add("loads", {"server": number, **summary, **same_texts})
                busy = summary["client_cpu_share"]
                table(
                    *(number, concurrency),
                    *(summary["tokens_per_second"], summary["steady_tokens_per_second"]),
                    summary["requests_per_second"],
                    *_cells(summary["first_token_ms"]),
                    *_cells(summary["chunk_gap_ms"]),
                    summary["ms_per_token"],
                    *_cells(summary["request_ms"]),
                    *(summary["failed"], summary["prompt_tokens"], summary["completion_tokens"]),
                    *(f"{sum(same)}/{len(same)}", f"{busy:.2f}"),
                )
                # Caveats of a row; failed requests are also an error of the report.
                if summary["failed"]:
                    failed = f"{summary['failed']} of {summary['requests']} requests failed"
                    message = f"{failed}; the first: {summary['first_error']}"
                    report.line(f"  {message}")
                    report.add("errors", {"section": name, "error": message})
                if summary["short_texts"]:
                    report.line(
                        f"  {summary['short_texts']} texts have fewer than {load.max_new_tokens} tokens: the server's "
                        "context ends there, or it takes no ignore_eos"
                    )
                if busy > BUSY_CLIENT:
                    report.line(f"  the client limits this: it was busy for {busy:.0%} of the time")
