"""Ask a server for the same texts twice, and show in how few steps the second ones are written.

redrafter serve --port 8000 &
python examples/edits/ask_twice.py http://127.0.0.1:8000

All prompts are asked in turn, then all of them again, with the same seed, another seed, and another first word. Beside
`redrafter serve --draft-from-answers off` it shows what the server's own earlier texts are worth as drafts.
"""

import argparse
import json
import time
import urllib.request
from pathlib import Path

SHIPPED = Path(__file__).parents[2] / "tests" / "data" / "held_out.jsonl"


def ask(url: str, prompt: str, **settings: object) -> dict:
    """Return the server's answer to a prompt."""
    body = json.dumps({"prompt": prompt, "ignore_eos": True} | settings).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def main() -> None:
    """Print a line for each round of each temperature."""
    parser = argparse.ArgumentParser(description="Ask a server for the same texts twice.")
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="where the server listens")
    parser.add_argument("--prompts", type=Path, default=SHIPPED, help="rows with a prompt, .jsonl")
    parser.add_argument("--count", type=int, default=16, help="prompts to ask")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of each text")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    args = parser.parse_args()
    lines = args.prompts.read_text(encoding="utf-8").splitlines()[: args.count]
    prompts = [json.loads(line)["prompt"].replace("<|bos|>", "") for line in lines]
    changed = [f"Again {prompt.partition(' ')[2]}" for prompt in prompts]
    for temperature in args.temperature:
        rounds = (
            ("first", prompts, 0),
            ("same seed", prompts, 0),
            ("other seed", prompts, 1),
            ("other word", changed, 0),
        )
        for name, asked, seed in rounds:
            began, tokens, steps, copied = time.perf_counter(), 0, 0, 0
            for number, prompt in enumerate(asked):
                settings = {"max_tokens": args.max_tokens, "temperature": temperature, "seed": 1000 * seed + number}
                answer = ask(args.url, prompt, **settings)
                told = answer["metrics"]["speculative_decoding"]
                steps += told["num_spec_steps"]
                tokens += told["num_spec_steps"] + told["num_accepted_draft_tokens"]
                copied += told["num_accepted_copied_tokens"]
            milliseconds = 1e3 * (time.perf_counter() - began) / (len(asked) * args.max_tokens)
            per_step = f"{tokens / steps:5.2f} tokens per step, {copied / steps:5.2f} of them copied"
            print(f"T={temperature:<4} {name:10} {per_step}, {milliseconds:6.2f} ms per token", flush=True)


if __name__ == "__main__":
    main()
