"""Time `model.generate`, undrafted decoding, drafts and llama.cpp on a CPU, on the same prompts one at a time.

python examples/smollm2/cpu.py --model build/smollm2 --drafter examples/smollm2/drafter --gguf build/model.gguf

Each of them continues each prompt in turn, so that what else runs slows them alike. With one thread the CPU time of the
process is measured, else the clock. `--gguf` needs llama-cpp-python, which pip builds from source.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import transformers

from redrafter import ReDrafter
from redrafter.checkpoints.tokenizers import load_tokenizer
from redrafter.measure.prompts import encode, read_prompts


def llama_cpp(path: str, threads: int, new: int, temperature: float) -> Callable[[list[int], int], Any]:
    """Return what continues a prompt by `new` tokens with llama.cpp."""
    from llama_cpp import Llama

    model = Llama(path, n_threads=threads, n_threads_batch=threads, n_ctx=1024, verbose=False)
    settings = {
        "temp": temperature,
        "top_k": 0 if temperature else 1,
        "top_p": 1.0,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
    }

    def answer(prompt: list[int], _: int) -> None:
        model.reset()
        tokens = model.generate(prompt, **settings)
        for _ in range(new):
            next(tokens)

    return answer


def main() -> None:
    """Measure and print a table for each temperature."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--gguf", help="the same model for llama.cpp (default: leave it out)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", default="examples/smollm2/prompts.jsonl")
    parser.add_argument("--count", type=int, default=10, help="prompts to continue (default: %(default)s)")
    parser.add_argument(
        "--max-new-tokens", type=int, default=64, help="of each, whatever they are (default: %(default)s)"
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    prompts = encode(read_prompts(args.prompts)[: args.count], load_tokenizer(args.model))
    engine = ReDrafter.from_pretrained(args.model, args.drafter, dtype=args.dtype, device="cpu")
    clock, new = (time.process_time if args.threads == 1 else time.perf_counter), args.max_new_tokens

    for temperature in args.temperatures:
        how: dict[str, Any] = {"min_new_tokens": new, "max_new_tokens": new, "do_sample": temperature > 0}
        if temperature:
            how |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        drafted: list[Any] = []

        def stock(prompt: list[int], _: int, how: dict[str, Any] = how) -> None:
            engine.model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **how)

        def ours(prompt: list[int], seed: int, *, speculate: bool, how: dict[str, Any] = how) -> Any:
            ids = torch.tensor([prompt])
            return engine.generate(ids, seed=seed, speculate=speculate, return_dict_in_generate=True, **how)

        ways: dict[str, Callable[[list[int], int], Any]] = {
            "undrafted": lambda prompt, seed: ours(prompt, seed, speculate=False),
            "drafts": lambda prompt, seed: drafted.append(ours(prompt, seed, speculate=True).stats),  # noqa: B023
            "model.generate": stock,
        }
        if args.gguf:
            ways["llama.cpp"] = llama_cpp(args.gguf, args.threads, new, temperature)
        seconds, names = defaultdict[str, float](float), list(ways)
        for number, prompt in enumerate(prompts):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                began = clock()
                ways[name](prompt, number)
                seconds[name] += clock() - began
        per_step = sum(each.emitted for each in drafted) / sum(each.steps for each in drafted)
        print(
            f"{engine.target.dtype}, T={temperature:g}, {args.threads} threads; {per_step:.2f} tokens per step",
            flush=True,
        )
        for name in names:
            rate, ratio = new * len(prompts) / seconds[name], seconds["undrafted"] / seconds[name]
            print(f"    {name:15} {rate:6.1f} tokens/s   {ratio:.2f}x undrafted", flush=True)


if __name__ == "__main__":
    main()
