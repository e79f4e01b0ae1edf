"""Measure a server: tokens per second and time to the first token, by the number of concurrent requests.

python examples/server/load.py http://127.0.0.1:8000 --concurrency 1,8,32 --prompts prompts.jsonl
"""

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path

import httpx


async def ask(client: httpx.AsyncClient, body: dict) -> tuple[float, int, dict]:
    """Stream a completion; return seconds to its first token, its tokens, and its speculation metrics."""
    start, first, last_event = time.perf_counter(), 0.0, ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit((await response.aread()).decode())
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - start
                last_event = line
    answer = json.loads(last_event.removeprefix("data: "))
    return first, answer["usage"]["completion_tokens"], answer["metrics"]["speculative_decoding"]


async def measure(client: httpx.AsyncClient, bodies: list[dict], concurrency: int) -> dict[str, float]:
    """Send all requests, at most `concurrency` at once, and return the row of numbers to print."""
    gate = asyncio.Semaphore(concurrency)

    async def ask_in_turn(body: dict) -> tuple[float, int, dict]:
        async with gate:
            return await ask(client, body)

    start = time.perf_counter()
    answers = await asyncio.gather(*map(ask_in_turn, bodies))
    seconds = time.perf_counter() - start
    first = sorted(seconds_to_first for seconds_to_first, _, _ in answers)
    steps = sum(metrics["num_spec_steps"] for _, _, metrics in answers)
    accepted = sum(metrics["num_accepted_draft_tokens"] for _, _, metrics in answers)
    return {
        "concurrency": concurrency,
        "tokens/s": sum(tokens for _, tokens, _ in answers) / seconds,
        "first token p50, ms": statistics.median(first) * 1e3,
        "p99": first[min(len(first) - 1, int(len(first) * 0.99))] * 1e3,
        "tokens/step": 1 + accepted / steps if steps else 1.0,
    }


async def main() -> None:
    """Read the arguments, and print a row for each number of concurrent requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", help="a file of JSON lines, each with a text under prompt or text")
    args = parser.parse_args()
    texts = ["Once upon a time", "def main():", "The sea was", "How do I list the files of a folder?"]
    if args.prompts is not None:
        rows = map(json.loads, Path(args.prompts).read_text(encoding="utf-8").splitlines())
        texts = [row.get("prompt") or row.get("text") for row in rows]
        if None in texts:
            raise SystemExit(f"{args.prompts}: this asks for completions of text, and some rows are no plain text")
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=args.url, timeout=None, limits=limits) as client:
        for concurrency in map(int, args.concurrency.split(",")):
            for count in (2 * concurrency, args.requests):  # the first round, which makes steps of this size, is unseen
                options = {"max_tokens": args.max_tokens, "temperature": args.temperature, "ignore_eos": True}
                options |= {"stream": True, "stream_options": {"include_usage": True}}
                bodies = [{"prompt": texts[i % len(texts)], "seed": i, **options} for i in range(count)]
                row = await measure(client, bodies, concurrency)
            print("  ".join(f"{name} {value:.5g}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
