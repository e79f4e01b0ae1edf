"""How fast the boxed pair writes on this machine: one prompt at a time, every way in turn, so that ratios are paired.

    python examples/tiny_pair/speed.py --prompts tests/data/held_out.jsonl --count 20 --threads 2

The bare loop is the least that undrafted decoding can cost: the model, a `DynamicCache`, an argmax, nothing else.

    python examples/tiny_pair/speed.py --prefill 100 900 2000 8000 --repeats 5 --threads 1

times how prompts of so many random ids are read instead, one and four of unequal lengths, beside `model.generate`.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from redrafter import PromptLookup, ReDrafter, boxed_pair
from redrafter.checkpoints.tokenizers import load_tokenizer
from redrafter.measure.prompts import encode, read_prompts

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
source = parser.add_mutually_exclusive_group(required=True)
source.add_argument("--prompts", type=Path, help="rows, as of every --prompts")
source.add_argument("--prefill", type=int, nargs="+", metavar="TOKENS", help="time how prompts of so many are read")
parser.add_argument("--layers", type=int, help="of the base, with --prefill (default: all)")
parser.add_argument("--count", type=int, default=20, help="prompts, the first of the file (default: %(default)s)")
parser.add_argument("--new", type=int, default=64, help="tokens written after each (default: %(default)s)")
parser.add_argument("--budgets", type=int, nargs="+", default=[8, 12, 16, 20, 26], help="node budgets")
parser.add_argument("--repeats", type=int, default=3, help="runs of each, the best of which counts")
parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default)")
parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="(default: %(default)s)")
args = parser.parse_args()
torch.set_num_threads(args.threads)
logging.set_verbosity_error()
logging.disable_progress_bar()


def prefill(tokens: int, rows: int) -> None:
    """Print seconds to the first token of `rows` prompts, the longest of so many tokens, and the paired ratio."""
    layers = {} if args.layers is None else {"num_hidden_layers": args.layers}
    base = AutoModelForCausalLM.from_pretrained(boxed_pair(), max_position_embeddings=tokens + 1, **layers)
    engine = PromptLookup.from_pretrained(base)
    ids = torch.randint(3, base.config.vocab_size, (rows, tokens))
    mask = (torch.arange(tokens) >= tokens * torch.arange(rows)[:, None] // 5).long()  # padded on the left
    ways = [engine.generate, base.generate]
    taken: list[list[float]] = [[], []]
    for repeat in range(args.repeats + 1):
        for way in (0, 1) if repeat % 2 else (1, 0):
            began = time.perf_counter()
            ways[way](input_ids=ids * mask, attention_mask=mask, max_new_tokens=1, do_sample=False)
            taken[way].append(time.perf_counter() - began)
    ours, theirs = (times[1:] for times in taken)  # the first is a warm-up
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    print(f"{tokens:8d}{rows:6d}{statistics.median(ours):10.3f}{statistics.median(theirs):16.3f}{ratio:7.2f}")


if args.prefill:
    print(f"{'tokens':>8s}{'rows':>6s}{'here, s':>10s}{'model.generate':>16s}{'ratio':>7s}")
    for tokens in args.prefill:
        for rows in (1, 4):
            prefill(tokens, rows)
    raise SystemExit

tokenizer = load_tokenizer(boxed_pair())
first = ReDrafter.from_pretrained(boxed_pair())
engines = {n: ReDrafter.from_pretrained(first.model, first.drafter, node_budget=n) for n in args.budgets}
rows = read_prompts(str(args.prompts))[: args.count]
prompts = [torch.tensor([ids]) for ids in encode(rows, tokenizer)]
length = {"max_new_tokens": args.new, "eos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
how = {"do_sample": True, "temperature": args.temperature, "top_k": 0} if args.temperature else {"do_sample": False}


@torch.inference_mode()
def bare_loop(ids: Tensor) -> Tensor:
    """Decode greedily with the model and a cache alone, at any temperature: the least that decoding can cost."""
    cache, text = DynamicCache(), [ids]
    logits = first.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    for _ in range(args.new - 1):
        text.append(logits[:, -1:].argmax(-1))
        logits = first.model(text[-1], past_key_values=cache, use_cache=True).logits
    return torch.cat([*text, logits[:, -1:].argmax(-1)], dim=1)


def speculative(engine: ReDrafter) -> Callable[[Tensor], Tensor]:
    """Return a function that decodes a prompt with an engine and counts its steps."""

    def run(ids: Tensor) -> Tensor:
        out = engine.generate(ids, seed=1, return_dict_in_generate=True, **length, **how)
        counts[engine.proposer.nodes][0] += out.stats.emitted
        counts[engine.proposer.nodes][1] += out.stats.steps
        return out.sequences

    return run


counts = {n: [0, 0] for n in engines}
ways: dict[str, Callable[[Tensor], Tensor]] = {
    "bare loop": bare_loop,
    "plain": lambda ids: first.generate(ids, seed=1, speculate=False, **length, **how),
    "model.generate": lambda ids: first.model.generate(ids, **length, **how),
}
ways |= {f"{n} nodes": speculative(engine) for n, engine in engines.items()}
for run in ways.values():  # warm-up
    run(prompts[0])
counts.update({n: [0, 0] for n in engines})
seconds: dict[str, list[float]] = {name: [] for name in ways}
differ = 0
for ids in prompts:
    texts, taken = {}, {name: [] for name in ways}
    for _ in range(args.repeats):
        for name, run in ways.items():
            began = time.perf_counter()
            texts[name] = run(ids)
            taken[name].append(time.perf_counter() - began)
    for name, times in taken.items():  # the best of the repeats: whatever else the machine did only adds
        seconds[name].append(min(times))
    differ += sum(not torch.equal(texts[f"{n} nodes"], texts["plain"]) for n in engines)

print(f"{len(prompts)} prompts x {args.new} tokens, temperature {args.temperature:g}, float32, {args.threads} threads")
print(f"outputs that differ from undrafted decoding: {differ}")
print(f"{'':16s}{'ms/token':>9s}{'tokens/step':>12s}{'x plain':>9s}{'x model.generate':>18s}")
for name, times in seconds.items():
    total, plain, stock = sum(times), sum(seconds["plain"]), sum(seconds["model.generate"])
    emitted, steps = counts[int(name.split()[0])] if name.endswith("nodes") else (1, 1)
    per_token = 1000 * total / (args.new * len(prompts))
    print(f"{name:16s}{per_token:9.2f}{emitted / steps:12.2f}{plain / total:9.2f}{stock / total:18.2f}")
over = statistics.median(p / b for p, b in zip(seconds["plain"], seconds["bare loop"], strict=True))
print(f"undrafted decoding over the bare loop, median of paired runs: {over:.3f}")
