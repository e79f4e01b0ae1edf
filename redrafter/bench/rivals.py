"""What Hugging Face's own `generate` does on the same prompts, in the same process."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from redrafter.errors import ArgumentError, first_line
from redrafter.measure.stopwatch import Stopwatch
from redrafter.measure.workload import Workload, padded

__all__ = ["RIVALS", "Rival", "check_names", "measure_rivals"]

RIVALS = ("eager", "static", "assisted")
PROMPTS = 4  # that rivals write on from, one at a time
LOOKUP = 10  # tokens that prompt lookup proposes


@dataclass(frozen=True)
class Rival:
    """One rival at batch 1. speedup: our speculative tokens/s over its, on the same prompts. same_texts: of `prompts`
    texts, those that plain decoding wrote too; None when sampling, which draws other noise. error: why there are no
    numbers."""

    name: str
    what: str
    prompts: int
    tokens_per_second: float | None = None
    speedup: float | None = None
    first_request_s: float | None = None
    same_texts: int | None = None
    error: str | None = None


def check_names(names: Sequence[str]) -> None:
    for name in names:
        if name not in RIVALS:
            raise ArgumentError(f"--against takes any of {', '.join(RIVALS)}, got {name!r}")


def measure_rivals(work: Workload, names: Sequence[str], assistant: str | None) -> Iterator[Rival]:
    """One after the other; one that fails says why."""
    prompts = [work.prompts[i % len(work.prompts)] for i in range(min(PROMPTS, work.num_prompts))]
    work.run(prompts[:1], True)
    ours = [work.run([prompt], True) for prompt in prompts]
    plain = [work.run([prompt], False).tokens[0] for prompt in prompts]
    speed = sum(run.count for run in ours) / sum(run.seconds for run in ours)
    for name in names:
        what = name
        try:
            what, arguments = _arguments(work, name, assistant)
            yield _measure(work, name, what, prompts, arguments, plain, speed)
        except Exception as error:
            yield Rival(name, what, len(prompts), error=f"{type(error).__name__}: {first_line(error)}")
        if work.device.type == "cuda":
            torch.cuda.empty_cache()


def _arguments(work: Workload, name: str, assistant: str | None) -> tuple[str, dict[str, Any]]:
    attention = work.engine.model.config._attn_implementation
    if name == "eager":
        return f"model.generate, not compiled, {attention}, growing cache", {}
    if name == "static":
        compiled = "compiled" if work.device.type == "cuda" else "not compiled on a CPU"
        return f"model.generate, static cache, {compiled}", {"cache_implementation": "static"}
    if assistant is None:
        return f"assisted generation, prompt lookup of {LOOKUP} tokens", {"prompt_lookup_num_tokens": LOOKUP}
    model: Any = AutoModelForCausalLM.from_pretrained(assistant, dtype=work.engine.target.dtype)
    model = model.to(work.device).eval()
    model.generation_config.eos_token_id = None
    return f"assisted generation, {assistant}", {"assistant_model": model}


def _measure(
    work: Workload,
    name: str,
    what: str,
    prompts: list[Sequence[int]],
    arguments: dict[str, Any],
    plain: list[list[int]],
    ours: float,
) -> Rival:
    """A static cache is as long as its prompt needs: padding them to one length spares it a compilation for each."""
    ids, mask = padded(prompts, work.pad_token)
    seconds: list[float] = []
    texts: list[list[int]] = []
    for index in (0, *range(len(prompts))):  # the first once more, apart: it compiles
        begin = 0 if name == "static" else int(mask.shape[1] - mask[index].sum())
        mine, seen = (x[index : index + 1, begin:].to(work.device) for x in (ids, mask))
        torch.manual_seed(work.seed)
        with Stopwatch(work.device) as watch:
            out = work.engine.model.generate(mine, attention_mask=seen, **work.arguments(), **arguments)
        seconds.append(watch.seconds)
        texts.append(out[0, mine.shape[1] :].tolist())
        if len(texts[-1]) != work.max_new_tokens:
            raise RuntimeError(f"it wrote {len(texts[-1])} tokens, not {work.max_new_tokens}")
    speed = len(prompts) * work.max_new_tokens / sum(seconds[1:])
    same = None if work.temperature else sum(a == b for a, b in zip(texts[1:], plain, strict=True))
    return Rival(name, what, len(prompts), speed, ours / speed, seconds[0], same)
