"""Measure servers of OpenAI's protocol under load, with streams at once or requests that arrive at random.

python benchmarks/load.py http://127.0.0.1:8000 http://127.0.0.1:8001 --concurrency 1,8,32 --prompts prompts.jsonl
python benchmarks/load.py http://127.0.0.1:8000 http://127.0.0.1:8001 --rate 4,16,64 --prompts prompts.jsonl

Answers are timed chunk by chunk. Request i continues prompt i (`/v1/completions`) or answers chat i
(`/v1/chat/completions`), modulo their number, with the seed plus i. Each concurrency or rate has its own prompts while
they last, and a warm-up the last ones of the file: a server that learns from the texts that it writes shall not know
those that it is measured on. Only the temperature decides how texts are drawn, not the top-k or the penalties of a
model's generation config, which servers otherwise take. Texts are compared with those of the first server. Above 0.8 of
a processor, the client limits the measurement. `servers.py` also starts the servers.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

from redrafter.app.flags import integers
from redrafter.app.program import run_command
from redrafter.data.prompts import turns_before_answer
from redrafter.data.rows import Row
from redrafter.errors import ArgumentError, ReDrafterError
from redrafter.measure.prompts import read_prompts
from redrafter.measure.table import format_table

FAILURES = (ClientError, OSError, ValueError, LookupError, AttributeError, TypeError, asyncio.TimeoutError)


class LoadError(ReDrafterError):
    """A server cannot be measured."""


@dataclass(frozen=True)
class Load:
    """Requests to one server, and how they are sent.

    Attributes:
        size: Requests at once; on average those that arrive per second, if they are `random`.
        count: Number of requests.
        first: Number of the first request, which selects its prompt and its seed.
        temperature: Their temperature.
        random: Whether requests arrive in a Poisson stream.
    """

    size: int
    count: int
    first: int = 0
    temperature: float = 0.0
    random: bool = False

    def __post_init__(self) -> None:
        if min(self.size, self.count) < 1:
            raise ArgumentError(f"a load has at least one stream and one request, got {self.size} and {self.count}")


@dataclass
class Completion:
    """One request and its result; times are from `time.perf_counter`, in seconds."""

    index: int
    sent: float
    ended: float = 0.0  # when its answer had ended, or failed
    chunk_times: list[float] = field(default_factory=list)  # when each chunk of the stream came
    text_times: list[float] = field(default_factory=list)  # the same of those with text
    text: str = ""
    tokens: int = 0  # by the server's count
    drafts: tuple[int, int] = (0, 0)  # steps that had drafts, and accepted ones, of a server that reports them
    error: str | None = None

    def note(self, data: bytes, now: float) -> None:
        """Record an event of the stream; raise `ValueError` for an error in it."""
        event = json.loads(data)
        if error := event.get("error"):
            raise ValueError(error)
        if event.get("choices"):
            self.chunk_times.append(now)  # those without text carry tokens of incomplete characters
            choice = event["choices"][0]
            if text := choice.get("text") or choice.get("delta", {}).get("content"):
                self.text += text
                self.text_times.append(now)
        self.tokens = (event.get("usage") or {}).get("completion_tokens", self.tokens)
        if metrics := (event.get("metrics") or {}).get("speculative_decoding"):
            self.drafts = metrics["num_spec_steps"], metrics["num_accepted_draft_tokens"]


def body_of(row: Row) -> dict[str, Any]:
    """Return the fields of a request for a row: a chat's messages up to the answer, or a text to continue."""
    messages = deepcopy(turns_before_answer(row))
    if not messages:
        return {"prompt": row.text if row.prompt is None else row.prompt}
    for message in (message for message in messages if message.get("tool_calls")):
        # A request has the arguments of a call as JSON text, and an id for each call.
        calls = [{"id": f"call_{number}"} | call for number, call in enumerate(message["tool_calls"])]
        for call in (call["function"] for call in calls if not isinstance(call["function"]["arguments"], str)):
            call["arguments"] = json.dumps(call["arguments"])
        message["tool_calls"] = calls
    more = {"tools": row.tools, "chat_template_kwargs": row.template_kwargs}
    return {"messages": messages} | {name: value for name, value in more.items() if value}


async def ask(session: ClientSession, url: str, index: int, body: dict[str, Any]) -> Completion:
    """Send one request and time its stream; a failure is recorded, not raised."""
    route = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    completion, done = Completion(index, time.perf_counter()), False
    try:
        async with session.post(url + route, json=body) as response:
            if response.status != 200:
                raise ValueError(f"HTTP {response.status}: {' '.join((await response.text()).split())[:300]}")
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    done = True
                elif line.startswith(b"data:"):
                    completion.note(line[5:], time.perf_counter())
        if not done or not completion.tokens or not completion.chunk_times:
            raise ValueError("the stream ended without [DONE], or without usage")
    except FAILURES as error:
        completion.error = f"{type(error).__name__}: {error}"
    completion.ended = time.perf_counter()
    return completion


async def run_load(
    session: ClientSession,
    url: str,
    bodies: Sequence[dict[str, Any]],
    slots: int,
    *,
    salted: bool = True,
    arrivals: Sequence[float] | None = None,
) -> list[Completion]:
    """Send all requests, and return them in the order in which they ended.

    Args:
        session: The client.
        url: The server.
        bodies: Bodies of the requests.
        slots: Requests at once; as many as there are for `arrivals`.
        salted: Whether each request has its own salt.
        arrivals: Seconds from now at which each request is sent, ascending; None to send each when a slot is free.
    """
    completions, indices = list[Completion](), iter(range(len(bodies)))  # shared: a slot takes the next index
    began = time.perf_counter()

    async def fill_slot() -> None:
        for index in indices:
            if arrivals is not None:
                await asyncio.sleep(began + arrivals[index] - time.perf_counter())
            # Otherwise a server reuses keys and values, or drafts, of the same prompt before.
            salt = {"cache_salt": uuid4().hex} if salted else {}
            completions.append(await ask(session, url, index, bodies[index] | salt))

    await asyncio.gather(*(fill_slot() for _ in range(slots)))
    return completions


def poisson_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Return when requests arrive, in seconds: `rate` of them each second on average, each regardless of the others."""
    generator = random.Random(seed)
    return [*accumulate(generator.expovariate(rate) for _ in range(count))]


def percentiles(name: str, seconds: list[float]) -> dict[str, float | None]:
    """Return p50 and p99 of times in ms, with linear interpolation, under `name`."""
    cuts = (
        statistics.quantiles(seconds if len(seconds) > 1 else seconds * 2, n=100, method="inclusive") if seconds else []
    )
    return {f"{name} p{share}": 1e3 * cuts[share - 1] if cuts else None for share in (50, 99)}


def steady_rate(completions: Sequence[Completion], slots: int) -> float | None:
    """Return tokens per second, spread evenly over chunks, from the last slot's first text until a slot is idle."""
    first = sorted(completions, key=lambda one: one.index)[:slots]
    begin = max([*one.chunk_times, one.ended][0] for one in first)
    end = sorted(one.ended for one in completions)[-min(slots, len(completions))]
    if end <= begin:
        return None
    shares = [(sum(begin < at <= end for at in one.chunk_times), one) for one in completions if not one.error]
    return sum(count * one.tokens / len(one.chunk_times) for count, one in shares) / (end - begin)


def summarize(completions: Sequence[Completion], slots: int, seconds: float) -> dict[str, Any]:
    """Return throughput and latencies of a load, by the columns of the table; failed requests count as such only.

    `slots` requests were sent at once; 0 where they arrived at random, so that no part of the load is steady.
    """
    answered = [one for one in completions if not one.error]
    tokens, steps = sum(one.tokens for one in answered), sum(one.drafts[0] for one in answered)
    shown = [one.text_times or [one.ended] for one in answered]  # a completion without text shows when it ends
    streaming = sum(one.chunk_times[-1] - one.chunk_times[0] for one in answered)
    return {
        "tok/s": tokens / seconds,
        "steady": steady_rate(completions, slots) if slots else None,
        "req/s": len(answered) / seconds,
        **percentiles("first", [times[0] - one.sent for times, one in zip(shown, answered, strict=True)]),
        **percentiles("gap", [b - a for times in shown for a, b in pairwise(times)]),  # a chunk may hold several tokens
        "per token": 1e3 * streaming / (tokens - len(answered)) if tokens > len(answered) else None,
        **percentiles("request", [one.ended - one.sent for one in answered]),
        "tokens": tokens,
        "tokens/step": 1 + sum(one.drafts[1] for one in answered) / steps if steps else None,
        "failed": len(completions) - len(answered),
    }


@dataclass
class Client:
    """Loads servers with the same requests, and compares their texts.

    Attributes:
        session: The connections.
        rows: The prompts.
        args: The flags of `add_client_flags`.
        texts: The first text that a server wrote, by the number of its request.
    """

    session: ClientSession
    rows: Sequence[Row]
    args: argparse.Namespace
    texts: dict[int, str] = field(default_factory=dict)

    async def measure(self, url: str, load: Load, *, seeded: bool = True) -> dict[str, Any]:
        """Load a server after a warm-up, and return throughput, latencies and how many texts are those of the first.

        Args:
            url: The server.
            load: Its load.
            seeded: Whether each request has a seed.

        Raises:
            LoadError: It answers no request of the warm-up, or is not a server of OpenAI's protocol.
        """
        args, first, salted = self.args, load.first, not self.args.shared
        fields = {"model": args.model or await self._first_model(url), "temperature": load.temperature}
        fields |= {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        fields |= {"max_tokens": args.max_new_tokens, "ignore_eos": True}
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
        bodies = [
            body_of(self.rows[index % len(self.rows)]) | fields | ({"seed": args.seed + abs(index)} if seeded else {})
            for index in (*range(first, first + load.count), *range(-load.size, 0))
        ]
        warm_up = await run_load(self.session, url, bodies[load.count :], load.size, salted=salted)
        if all(one.error for one in warm_up):
            raise LoadError(f"{url} answers nothing: {warm_up[0].error}")
        arrivals = poisson_arrivals(load.count, load.size, args.seed) if load.random else None
        slots = load.count if load.random else load.size
        began, cpu = time.perf_counter(), time.process_time()
        done = await run_load(self.session, url, bodies[: load.count], slots, salted=salted, arrivals=arrivals)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        texts = {first + one.index: one.text for one in done if not one.error}
        self.texts = texts | self.texts
        same = sum(text == self.texts[index] for index, text in texts.items())
        line = summarize(done, 0 if load.random else load.size, seconds)
        return line | {"same texts": f"{same}/{len(texts)}", "client": cpu / seconds}

    async def _first_model(self, url: str) -> str:
        try:
            async with self.session.get(f"{url}/v1/models") as response:
                return json.loads(await response.read())["data"][0]["id"]
        except FAILURES as error:
            raise LoadError(f"{url} is not a server of OpenAI's protocol: {type(error).__name__}: {error}") from error


def add_client_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a `Client`."""
    parser.add_argument("--prompts", help="file of prompts or rows (default: those that ship)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="the server's name of its model (default: the first that it lists)")
    parser.add_argument(
        "--shared", action="store_true", help="requests share prefixes and recycled tokens, as a user's do"
    )


@asynccontextmanager
async def connect(args: argparse.Namespace) -> AsyncIterator[Client]:
    """Yield a client with the flags of `add_client_flags`, and with the key of the environment."""
    rows, key = read_prompts(args.prompts), os.environ.get("REDRAFTER_API_KEY") or os.environ.get("OPENAI_API_KEY")
    headers, timeout = {"Authorization": f"Bearer {key}"} if key else {}, ClientTimeout(3600, sock_connect=10)
    async with ClientSession(headers=headers, connector=TCPConnector(limit=0), timeout=timeout) as session:
        yield Client(session, rows, args)


async def compare_urls(args: argparse.Namespace) -> int:
    """Measure each server at each concurrency or rate, and print a row for each. Returns 1 if a request failed."""
    lines, first, random = list[dict[str, Any]](), args.first, args.rate is not None
    async with connect(args) as client:
        for size in args.rate or args.concurrency:
            count = args.num_requests or max(8, (15 if random else 4) * size)
            load = Load(size, count, first, args.temperature, random)
            for url in (url.rstrip("/").removesuffix("/v1") for url in args.urls):
                found = await client.measure(url, load)
                lines.append({"server": url, "req/s sent" if random else "at once": size, **found})
            first += count
    print(*format_table(list(lines[0]), [list(line.values()) for line in lines]), sep="\n")
    if args.json:
        Path(args.json).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return int(any(line["failed"] for line in lines))


def main() -> int:
    """Compare the servers that the command line names. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs="+", metavar="URL")
    parser.add_argument("--concurrency", type=integers, default=(1, 8, 32), metavar="N,...")
    parser.add_argument(
        "--rate",
        type=integers,
        metavar="N,...",
        help="requests that arrive per second in a Poisson stream, in place"
        " of a fixed number at once; the same arrivals for each server, by --seed",
    )
    parser.add_argument(
        "--num-requests", type=int, help="of each load (default: 4 times the concurrency, 8 at least; 15 s of a rate)"
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first request, from 0 (default: 0)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", metavar="FILE", help="also write a line for each row")
    add_client_flags(parser)
    args = parser.parse_args()
    return run_command(lambda: asyncio.run(compare_urls(args)))


if __name__ == "__main__":
    raise SystemExit(main())
