"""Baselines: Hugging Face's own `generate` on the same prompts, in the same process."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import eq
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from redrafter.errors import ArgumentError, first_line
from redrafter.measure.run import Stopwatch, Workload, padded

__all__ = ["RIVALS", "Rival", "check_names", "measure_rivals"]

RIVALS = ("eager", "static", "assisted")
MAX_RIVAL_PROMPTS = 4  # prompts that rivals continue, one at a time
LOOKUP_TOKENS = 10  # drafts per step of Hugging Face's prompt lookup


@dataclass(frozen=True)
class Rival:
    """One baseline at batch 1.

    Attributes:
        name: One of `RIVALS`.
        what: Description of the baseline.
        prompts: Prompts that it continued.
        tokens_per_second: New tokens per second; None where it failed, like all numbers below.
        speedup: This library's speculative tokens per second over the baseline's, on the same prompts.
        first_request_s: Seconds of its first call, which compiles.
        same_texts: How many of its texts plain decoding wrote too; None when sampling, which draws other noise.
        error: Why there are no numbers; None where there are.
    """

    name: str
    what: str
    prompts: int
    tokens_per_second: float | None = None
    speedup: float | None = None
    first_request_s: float | None = None
    same_texts: int | None = None
    error: str | None = None


def check_names(names: Sequence[str]) -> None:
    """Raise `ArgumentError` for a name in `--against` that is not one of `RIVALS`."""
    for name in names:
        if name not in RIVALS:
            raise ArgumentError(f"--against takes any of {', '.join(RIVALS)}, got {name!r}")


def measure_rivals(work: Workload, names: Sequence[str], assistant: str | None) -> Iterator[Rival]:
    """Measure baselines one after the other; one that raises yields a `Rival` with its error.

    Args:
        work: The workload, of which the first `MAX_RIVAL_PROMPTS` prompts are continued.
        names: Which of `RIVALS` to measure.
        assistant: Hub id or directory of the assistant model for `assisted`; None for prompt lookup.
    """
    prompts = [work.prompts[i % len(work.prompts)] for i in range(min(MAX_RIVAL_PROMPTS, work.num_prompts))]
    work.run(prompts[:1], True)
    ours = [work.run([prompt], True) for prompt in prompts]
    plain = [work.run([prompt], False).tokens[0] for prompt in prompts]
    speed = sum(run.count for run in ours) / sum(run.seconds for run in ours)
    for name in names:
        what = name
        try:
            what, arguments = _arguments(work, name, assistant)
            texts, seconds = zip(*_measure(work, prompts, name == "static", arguments), strict=True)
            theirs = len(prompts) * work.max_new_tokens / sum(seconds[1:])
            same = None if work.temperature else sum(map(eq, texts[1:], plain))
            yield Rival(name, what, len(prompts), theirs, speed / theirs, seconds[0], same)
        except Exception as error:
            yield Rival(name, what, len(prompts), error=f"{type(error).__name__}: {first_line(error)}")
        if work.device.type == "cuda":
            torch.cuda.empty_cache()


def _arguments(work: Workload, name: str, assistant: str | None) -> tuple[str, dict[str, Any]]:
    """Return a baseline's description and its arguments for `model.generate`."""
    attention = getattr(work.engine.model.config, "_attn_implementation", "eager")
    if name == "eager":
        return f"model.generate, not compiled, {attention}, growing cache", {}
    if name == "static":
        compiled = "compiled" if work.device.type == "cuda" else "not compiled on a CPU"
        return f"model.generate, static cache, {compiled}", {"cache_implementation": "static"}
    if assistant is None:
        return f"assisted generation, prompt lookup of {LOOKUP_TOKENS} tokens", {
            "prompt_lookup_num_tokens": LOOKUP_TOKENS
        }
    model: Any = AutoModelForCausalLM.from_pretrained(assistant, dtype=work.engine.target.dtype)
    model = model.to(work.device).eval()
    model.generation_config.eos_token_id = None
    return f"assisted generation, {assistant}", {"assistant_model": model}


def _measure(
    work: Workload, prompts: list[Sequence[int]], static: bool, arguments: dict[str, Any]
) -> Iterator[tuple[list[int], float]]:
    """Yield text and seconds of each prompt alone, after a first call that is timed apart because it compiles."""
    ids, mask = padded(prompts, work.pad_token)
    for index in (0, *range(len(prompts))):
        # A static cache is compiled for its length: with prompts padded to one length, it is compiled once.
        begin = 0 if static else int(mask.shape[1] - mask[index].sum())
        prompt_ids, prompt_mask = (x[index : index + 1, begin:].to(work.device) for x in (ids, mask))
        torch.manual_seed(work.seed)
        with Stopwatch(work.device) as watch:
            out = work.engine.model.generate(prompt_ids, attention_mask=prompt_mask, **work.arguments(), **arguments)
        text = out[0, prompt_ids.shape[1] :].tolist()
        if len(text) != work.max_new_tokens:
            raise RuntimeError(f"it wrote {len(text)} tokens, not {work.max_new_tokens}")
        yield text, watch.seconds
