"""Measure what drafts copied from the text are worth beside a drafter, on edits of given code or on any prompts.

python examples/edits/measure.py                                # the boxed pair, 24 edits
python examples/edits/measure.py --follow                       # as if the base wrote each edit as it was asked for
python examples/edits/measure.py --base my-base --drafter my-drafter --prompts my-prompts.jsonl

Each prompt is written on with copies and without, in turn, and the two texts are compared: they are always equal. With
`--follow`, a logits processor leaves the base no other token than the `completion` of its row, so that a base too small
to edit code shows how many drafts would be accepted if it could; the drafter still sees that base's hidden states. The
time of such steps says nothing, as the processor runs in Python.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer

from redrafter import ReDrafter, boxed_pair

SHIPPED = Path(__file__).parents[2] / "tests" / "data" / "edits.jsonl"


class Follow:
    """Leaves no other token than that of a text."""

    def __init__(self, prompt: int, text: list[int]):
        self._prompt, self._text = prompt, text

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores `[1, V]` of which one is finite, that of the token that the text has after `ids` `[1, L]`."""
        at = min(ids.shape[1] - self._prompt, len(self._text) - 1)
        only = torch.full_like(scores, -torch.inf)
        only[:, self._text[at]] = 0.0
        return only


class Measured:
    """The sums of one way to draft."""

    def __init__(self) -> None:
        self.steps = self.tokens = self.copied = 0
        self.seconds = 0.0

    def line(self) -> str:
        """Return the numbers that a table shows."""
        return (
            f"{self.tokens / self.steps:13.2f} {1e3 * self.seconds / self.tokens:10.3f} "
            f"{1e3 * self.seconds / self.steps:9.2f} {self.tokens / self.seconds:9.0f} {self.copied / self.steps:8.2f}"
        )


def now(device: torch.device) -> float:
    """Return seconds: of this process on a CPU, which other processes do not slow; of the clock elsewhere."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    """Return prompts as ids and a mask, padded on the left."""
    longest = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts]),
        "attention_mask": torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]),
    }


def measure(engine: ReDrafter, batch: dict, settings: dict, sums: Measured) -> torch.Tensor:
    """Write on from prompts, add to the sums, and return the texts; the time of reading prompts is left out."""
    batch = {name: tensor.to(engine.target.device) for name, tensor in batch.items()}
    began = now(engine.target.device)
    engine.generate(**batch, **settings | {"max_new_tokens": 1})
    read = now(engine.target.device)
    out = engine.generate(**batch, **settings)
    sums.seconds += now(engine.target.device) - read - (read - began)
    sums.steps, sums.tokens = sums.steps + out.stats.steps, sums.tokens + out.stats.emitted
    sums.copied += out.stats.copied
    return out.sequences


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="Measure what drafts copied from the text are worth.")
    parser.add_argument("--base", default=None, help="base model (default: the boxed pair)")
    parser.add_argument("--drafter", default=None, help="its drafter (default: that of the base's directory)")
    parser.add_argument("--prompts", type=Path, default=SHIPPED, help="rows with a prompt and, to follow, a completion")
    parser.add_argument("--sources", nargs="+", default=(), help="sources of the rows to take (default: all)")
    parser.add_argument("--count", type=int, default=24, help="prompts to take")
    parser.add_argument("--new", type=int, default=128, help="tokens to write")
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="prompts at once")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    parser.add_argument("--follow", action="store_true", help="let the base write the rows' completions, greedily")
    parser.add_argument("--shape", type=int, nargs=3, default=None, help="beams, draft length and nodes (default: own)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default=None)
    args = parser.parse_args()
    base = args.base or boxed_pair()
    tokenizer = AutoTokenizer.from_pretrained(base)
    shape = dict(zip(("num_beams", "draft_len_per_beam", "node_budget"), args.shape or (None,) * 3, strict=True))
    engines = {
        copies: ReDrafter.from_pretrained(
            base, args.drafter, device=args.device, dtype=args.dtype, draft_from_text=copies, **shape
        )
        for copies in (False, True)
    }
    lines = args.prompts.read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if not args.sources or row["source"] in args.sources][: args.count]
    prompts = [tokenizer(row["prompt"], add_special_tokens="<|bos|>" not in row["prompt"]).input_ids for row in rows]
    print(f"{len(prompts)} prompts of {sum(map(len, prompts)) / len(prompts):.0f} tokens on average")
    print("    T rows copies tokens/step   ms/token   ms/step  tokens/s  copied/step")
    for temperature in [0.0] if args.follow else args.temperature:
        for size in args.rows:
            sums = {copies: Measured() for copies in engines}
            equal = total = 0
            for first in range(0, len(prompts), size):
                batch = padded(prompts[first : first + size])
                settings = {"max_new_tokens": args.new, "eos_token_id": None, "return_dict_in_generate": True}
                settings |= {"do_sample": True, "temperature": temperature, "top_k": 0, "seed": first}
                if not temperature:
                    settings |= {"do_sample": False, "temperature": None, "top_k": None, "seed": None}
                if args.follow:
                    text = tokenizer(rows[first]["completion"], add_special_tokens=False).input_ids
                    follow = Follow(len(prompts[first]), text)
                    settings |= {"logits_processor": [follow], "max_new_tokens": len(text)}
                order = list(engines) if first // size % 2 else list(engines)[::-1]
                texts = [measure(engines[copies], batch, settings, sums[copies]) for copies in order]
                equal, total = equal + bool(torch.equal(*texts)), total + 1
            for copies, each in sums.items():
                print(f"{temperature:5.1f} {size:4} {'yes' if copies else 'no':>6} {each.line()}", flush=True)
            before, after = sums[False], sums[True]
            print(
                f"      copies: {after.tokens / after.steps / (before.tokens / before.steps):.2f} x tokens per step, "
                f"{after.seconds / after.tokens / (before.seconds / before.tokens):.2f} x time per token; "
                f"{equal} of {total} texts are equal",
                flush=True,
            )


if __name__ == "__main__":
    main()
