"""What a server writes per second, and how soon a text begins, with so many requests at once.

python examples/server/load.py http://127.0.0.1:8000 --concurrency 1,8,32 --prompts prompts.jsonl
"""

import argparse
import asyncio
import json
import statistics
import time

import httpx

from redrafter.measure.prompts import read_prompts


async def ask(client: httpx.AsyncClient, body: dict) -> tuple[float, int, dict]:
    """Seconds to the first token, tokens, and what the answer says of speculation."""
    began, first, tail = time.perf_counter(), 0.0, {}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise SystemExit((await answer.aread()).decode())
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - began
                tail = line
    said = json.loads(tail.removeprefix("data: "))
    return first, said["usage"]["completion_tokens"], said["metrics"]["speculative_decoding"]


async def load(client: httpx.AsyncClient, bodies: list[dict], at_once: int) -> dict[str, float]:
    gate = asyncio.Semaphore(at_once)

    async def one(body: dict) -> tuple[float, int, dict]:
        async with gate:
            return await ask(client, body)

    began = time.perf_counter()
    found = await asyncio.gather(*map(one, bodies))
    seconds = time.perf_counter() - began
    first = sorted(each[0] for each in found)
    steps, accepted = (sum(each[2][name] for each in found) for name in ("num_spec_steps", "num_accepted_draft_tokens"))
    return {
        "concurrency": at_once,
        "tokens/s": sum(each[1] for each in found) / seconds,
        "first token p50, ms": statistics.median(first) * 1e3,
        "p99": first[min(len(first) - 1, int(len(first) * 0.99))] * 1e3,
        "tokens/step": 1 + accepted / steps if steps else 1.0,
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", help="a file of texts and prompts, read as by every --prompts")
    args = parser.parse_args()
    texts = ["Once upon a time", "def main():", "The sea was", "How do I list the files of a folder?"]
    if args.prompts is not None:
        texts = [row.prompt or row.text for row in read_prompts(args.prompts)]
        if None in texts:
            raise SystemExit(f"{args.prompts}: this asks for completions of text, and some rows are no plain text")
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=args.url, timeout=None, limits=limits) as client:
        for at_once in map(int, args.concurrency.split(",")):
            for count in (2 * at_once, args.requests):  # the first round, which makes the steps of this size, is unseen
                same = {"max_tokens": args.max_tokens, "temperature": args.temperature, "ignore_eos": True}
                same |= {"stream": True, "stream_options": {"include_usage": True}}
                bodies = [{"prompt": texts[i % len(texts)], "seed": i, **same} for i in range(count)]
                row = await load(client, bodies, at_once)
            print("  ".join(f"{name} {value:.5g}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
