"""Decode prompts in timed calls: of an engine's `generate`, and of transformers' own."""

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from redrafter.checkpoints.tokenizers import end_tokens
from redrafter.engine.call import GenerateOutput, GenerateStats
from redrafter.engine.engine import Engine
from redrafter.scheduler.sequence import Stats

PromptIds = Sequence[Sequence[int]]  # token ids of each prompt
Batches = Sequence[PromptIds]
DEFAULT_BATCH_SIZE = 32  # texts written at once
# Settings of a generation config other than the temperature are disabled: measure the model's own distribution.
_NEUTRAL = {"repetition_penalty": 1.0}
_NEUTRAL_SAMPLING = {"top_k": 0, "top_p": 1.0}


class Stopwatch:
    """A context manager that times the work inside it, with the device idle at both ends.

    Work queued earlier is excluded; kernels launched inside are included, until the last one completes.

    Attributes:
        seconds: Wall-clock time of the work; 0 until the context is left without an exception.
        began: When the work began, by `time.perf_counter`.
    """

    def __init__(self, device: torch.device):
        self.device, self.seconds, self.began = device, 0.0, 0.0

    def __enter__(self) -> "Stopwatch":
        self._wait()
        self.began = time.perf_counter()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self._wait()
            self.seconds = time.perf_counter() - self.began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Run:
    """One timed call of `generate` on a batch."""

    tokens: list[list[int]]  # new tokens of each output row
    stats: GenerateStats  # in total and per row
    seconds: float  # of the whole call, prefill included
    first_token: float | None = None  # seconds from the call to the first new token of any row

    @property
    def count(self) -> int:
        """New tokens of all rows."""
        return sum(map(len, self.tokens))

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows per second of the whole call."""
        return self.count / self.seconds


@dataclass
class RepeatedRuns:
    """The runs of one decoding method over repeated batches: for each repeat, one run per batch."""

    repeats: list[list[Run]] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """Time of each repeat."""
        return [sum(run.seconds for run in runs) for runs in self.repeats]

    @property
    def tokens_per_second(self) -> list[float]:
        """New tokens per second of each repeat."""
        return [sum(run.count for run in runs) / sum(run.seconds for run in runs) for runs in self.repeats]

    @property
    def stats(self) -> GenerateStats:
        """Speculation statistics of the first repeat, in total and per row of its batches."""
        return GenerateStats.from_rows([row for run in self.repeats[0] for row in run.stats.rows], None)

    def texts(self, repeat: int = 0) -> list[list[int]]:
        """Return the new token ids of each prompt in a repeat."""
        return [row for run in self.repeats[repeat] for row in run.tokens]

    def part(self, batches: range) -> "RepeatedRuns":
        """Return the runs of some batches, in each repeat."""
        return RepeatedRuns([[runs[index] for index in batches] for runs in self.repeats])

    def speedup(self, undrafted: "RepeatedRuns") -> float:
        """Return the speedup in tokens per second over `undrafted`: the median of the ratios of all repeats."""
        return median(a / b for a, b in zip(self.tokens_per_second, undrafted.tokens_per_second, strict=True))


def timed_run(engine: Engine, prompts: PromptIds, pad_token: int, **arguments: Any) -> Run:
    """Decode prompts in one timed call of `engine.generate`."""
    ids, mask = padded(prompts, pad_token)
    with Stopwatch(engine.target.device) as watch:
        out = engine.generate(ids, mask, return_dict_in_generate=True, **arguments)
    assert isinstance(out, GenerateOutput)
    assert out.stats is not None
    rows = zip(out.sequences[:, ids.shape[1] :].tolist(), out.stats.rows, strict=True)
    # The prefill, which is not a step, produces a row's first token.
    tokens, at = [row[: stats.emitted + 1] for row, stats in rows], out.stats.first_token_at
    return Run(tokens, out.stats, watch.seconds, None if at is None else at - watch.began)


def transformers_run(
    model: Any, prompt: Sequence[int], seed: int, *, pad: tuple[int, int] = (0, 0), count: bool = False, **more: Any
) -> Run:
    """Decode one prompt in one timed call of `model.generate`, with torch's global seed set to `seed`.

    Args:
        model: The model.
        prompt: Token ids.
        seed: The seed.
        pad: Length that the prompt is padded to, and the token that pads it.
        count: Whether to count the forwards of the model as steps; the first one also prefills the prompt.
        more: Further arguments of `generate`.
    """
    ids, mask = padded([prompt, [0] * pad[0]], pad[1])  # [2, P]; only the first row is decoded
    ids, mask = (x[:1].to(model.device) for x in (ids, mask))
    forwards: list[None] = []
    # transformers draws from torch's global generator.
    torch.manual_seed(seed)
    # Only with `count`: a hook makes torch.compile recompile a compiled model in each call.
    hook = model.register_forward_hook(lambda *_: forwards.append(None)) if count else nullcontext()
    with hook, Stopwatch(model.device) as watch:
        out = model.generate(ids, attention_mask=mask, **more)
    text = out[0, ids.shape[1] :].tolist()
    return Run([text], GenerateStats.from_rows([Stats(steps=len(forwards), emitted=len(text))], None), watch.seconds)


def padded(batch: PromptIds, pad_token: int) -> tuple[Tensor, Tensor]:
    """Return the ids and the attention mask of prompts, `[B, P]` int64 each, padded on the left with `pad_token`."""
    rows = [torch.tensor(row, dtype=torch.long) for row in batch]
    ids = pad_sequence(rows, batch_first=True, padding_value=pad_token, padding_side="left")
    ones = [torch.ones_like(row) for row in rows]
    return ids, pad_sequence(ones, batch_first=True, padding_side="left")


def pad_token_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id that pads prompts: the tokenizer's pad token, or else its end token, or 0."""
    return next(token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None)


@dataclass(frozen=True)
class Texts:
    """Texts that a base generated from prompts."""

    tokens: list[list[int]]  # token ids of each text, its prompt included
    prompt_lengths: list[int]  # tokens of each prompt
    ended: list[bool]  # whether an end token ended each text
    temperature: float = 0.0  # sampling temperature; 0 for greedy
    seeds: list[int] | None = None  # seed of each text; None for greedy

    @property
    def prompts(self) -> list[list[int]]:
        """The prompt of each text."""
        return [text[:length] for text, length in zip(self.tokens, self.prompt_lengths, strict=True)]

    @property
    def continuations(self) -> list[list[int]]:
        """The generated tokens of each text, without its prompt."""
        return [text[length:] for text, length in zip(self.tokens, self.prompt_lengths, strict=True)]

    def __add__(self, more: "Texts") -> "Texts":
        """Append texts of the same temperature."""
        joined = {name: getattr(self, name) + getattr(more, name) for name in ("tokens", "prompt_lengths", "ended")}
        return replace(self, **joined, seeds=None if self.seeds is None else self.seeds + (more.seeds or []))


def write_texts(
    engine: Engine,
    prompts: Sequence[list[int]],
    new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    *,
    end_ids: Collection[int] | None = None,
    batch_size: int = DEFAULT_BATCH_SIZE,
    report: Callable[[int], object] = lambda done: None,
) -> Texts:
    """Continue each prompt by undrafted decoding at a temperature, with all other sampling settings disabled.

    Prompt i, token ids, is continued by at most `new_tokens` tokens with `seed + i`; temperature 0 is greedy. `end_ids`
    end a text; None uses the generation config's. `batch_size` prompts are decoded at once, and `report` is
    called after each batch with the number of completed texts.
    """
    ends = sorted(end_tokens(engine.model) if end_ids is None else end_ids)
    # Sort by length to keep padding small; results are stored by the original index.
    tokens, order = list(map(list, prompts)), sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    settings: dict[str, Any] = _NEUTRAL | ({"eos_token_id": ends} if ends else {}) | {"do_sample": temperature > 0}
    if temperature > 0:
        settings |= _NEUTRAL_SAMPLING | {"temperature": temperature}
    report(0)
    for first in range(0, len(order), batch_size):
        indices = order[first : first + batch_size]
        # Seeds follow the prompt, not the batch, so that the batch size does not change texts.
        seeds = [seed + index for index in indices] if temperature > 0 else None
        batch = [prompts[index] for index in indices]
        # Without drafts, so that texts do not depend on the measured drafter.
        run = timed_run(engine, batch, 0, max_new_tokens=new_tokens, seed=seeds, speculate=False, **settings)
        for index, text in zip(indices, run.tokens, strict=True):
            tokens[index] += text
        report(first + len(indices))
    all_seeds = list(range(seed, seed + len(prompts))) if temperature > 0 else None
    return Texts(tokens, list(map(len, prompts)), [text[-1] in ends for text in tokens], temperature, all_seeds)


def repeated_share(texts: Sequence[list[int]], size: int = 4) -> float | None:
    """Return the fraction of n-grams that repeat an earlier n-gram of the same text.

    `texts` are token ids, and `size` is n. N-grams overlap: one starts at every token. Returns a value from 0 to 1 over
    all texts, or None if every text is shorter than `size`.
    """
    runs = [list(zip(*(text[offset:] for offset in range(size)), strict=False)) for text in texts]
    count = sum(map(len, runs))
    return (count - sum(len(set(text_runs)) for text_runs in runs)) / count if count else None
