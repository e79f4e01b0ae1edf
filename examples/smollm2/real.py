"""Compare every engine on a real chat model with `model.generate`, token by token, and print how fast it is.

python examples/smollm2/real.py --model build/smollm2 --drafter examples/smollm2/drafter

Each engine answers the prompts greedily, one at a time: in float32, where its tokens must be those of `model.generate`,
and in bfloat16 with batch_invariant=True, where they must be those of undrafted decoding. Exit code 1 if any differ.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from redrafter import DraftTarget, Engine, PromptLookup, ReDrafter, Stats, boxed_pair
from redrafter.checkpoints.tokenizers import load_tokenizer
from redrafter.measure.prompts import encode, read_prompts

DTYPES = ("float32", "bfloat16")
PROMPTS = Path(__file__).parent / "prompts.jsonl"
Tokens = list[list[int]]


def timed(generate: Callable[[torch.Tensor], torch.Tensor], prompts: Tokens) -> tuple[Tokens, float]:
    """Return the new tokens of each prompt, decoded one at a time, and the seconds that all took."""
    answers, began = [], time.perf_counter()
    for prompt in prompts:
        out = generate(torch.tensor([prompt]))
        answers.append(out[0, len(prompt) :].tolist())
    return answers, time.perf_counter() - began


def stock_answer(model: Any, greedy: dict[str, Any], ids: torch.Tensor) -> torch.Tensor:
    """Return a prompt and its answer by transformers."""
    ids = ids.to(model.device)
    return model.generate(ids, attention_mask=torch.ones_like(ids), **greedy)


def drafted_answer(engine: Engine, greedy: dict[str, Any], steps: list[Stats], ids: torch.Tensor) -> torch.Tensor:
    """Return a prompt and its answer by an engine, and add its statistics to `steps`."""
    out: Any = engine.generate(ids, return_dict_in_generate=True, **greedy)
    steps.append(out.stats)
    return out.sequences


def show(name: str, found: Tokens, expected: Tokens, what: str) -> bool:
    """Print how many answers equal those of `what`; return whether any differ."""
    equal = sum(a == b for a, b in zip(found, expected, strict=True))
    print(f"{name}: {equal} of {len(found)} answers equal to {what}", flush=True)
    return equal < len(found)


def main() -> int:
    """Measure and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--draft-model", default=str(boxed_pair()), help="for DraftTarget (default: the boxed base)")
    parser.add_argument("--prompts", default=str(PROMPTS))
    parser.add_argument("--count", type=int, default=40, help="prompts to answer (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=16, help="of each answer (default: %(default)s)")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="parts to run (default: both)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    transformers.logging.disable_progress_bar()
    prompts = encode(read_prompts(args.prompts)[: args.count], load_tokenizer(args.model))

    room = max(map(len, prompts)) + args.max_new_tokens  # a paged cache is taken for 64 sequences of that length
    makers: dict[str, Callable[..., Engine]] = {
        "ReDrafter": lambda **load: ReDrafter.from_pretrained(args.model, args.drafter, **load),
        "DraftTarget": lambda **load: DraftTarget.from_pretrained(args.model, args.draft_model, **load),
        "PromptLookup": lambda **load: PromptLookup.from_pretrained(args.model, **load),
    }
    greedy = {"do_sample": False, "max_new_tokens": args.max_new_tokens}
    failed = False
    for dtype in args.dtypes:
        invariant = dtype == "bfloat16"
        what, expected, plain_seconds = "undrafted decoding", None, 0.0
        if not invariant:
            what, model = (
                "model.generate",
                AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(args.device),
            )
            expected, seconds = timed(partial(stock_answer, model.eval(), greedy), prompts)
            print(f"model.generate in {dtype}: {sum(map(len, expected)) / seconds:.1f} tokens/s", flush=True)
            del model
        for name, make in makers.items():
            engine = make(dtype=dtype, device=args.device, batch_invariant=invariant, max_seq_len=room)
            for speculate in (True, False):  # what runs for the first time takes longer
                engine.generate(torch.tensor([prompts[0]]), speculate=speculate, do_sample=False, max_new_tokens=8)
            if not plain_seconds:  # the same for all engines
                engine.forget_prefixes()
                plain, plain_seconds = timed(partial(engine.generate, speculate=False, **greedy), prompts)
                if expected:
                    failed |= show(f"undrafted, {dtype}", plain, expected, what)
            engine.forget_prefixes()
            steps: list[Stats] = []
            found, seconds = timed(partial(drafted_answer, engine, greedy, steps), prompts)
            failed |= show(f"{name}, {dtype}", found, expected or plain, what)
            emitted, count = sum(each.emitted for each in steps), sum(each.steps for each in steps)
            print(
                f"    {emitted / max(count, 1):.2f} tokens per step, {sum(map(len, found)) / seconds:.1f} tokens/s, "
                f"{plain_seconds / seconds:.2f}x undrafted decoding",
                flush=True,
            )
            del engine
            gc.collect()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
