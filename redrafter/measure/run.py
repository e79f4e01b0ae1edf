"""Run measurements: a stopwatch, timed calls of `generate`, the workload that they decode, and their repeats."""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedTokenizerBase

from redrafter.drafting.proposer import Proposer
from redrafter.engine.call import GenerateOutput, GenerateStats
from redrafter.engine.engine import Engine
from redrafter.engine.redrafter import ReDrafter
from redrafter.errors import ArgumentError
from redrafter.parallel.ranks import ALONE, Ranks
from redrafter.scheduler.sequence import Stats

WARM_UP_CALLS = 2  # calls of `median_ms` that are not timed
MAX_TIMED_CALLS = 30  # calls that a median is of
MIN_TIMED_CALLS = 5  # fewest on a CPU, where timing stops after MAX_CPU_SECONDS
MAX_CPU_SECONDS = 0.5

Arrival = tuple[float, int, int]  # seconds from the call, row, and how many tokens it gained
PromptIds = Sequence[Sequence[int]]  # token ids of each prompt


class Stopwatch:
    """A context manager that times the work inside it, with the device idle at both ends.

    Work queued earlier is excluded; kernels launched inside are included, until the last one completes.

    Attributes:
        seconds: Wall-clock time of the work; 0 until the context is left without an exception.
    """

    def __init__(self, device: torch.device):
        self.device, self.seconds, self._began = device, 0.0, 0.0

    def __enter__(self) -> "Stopwatch":
        self._wait()
        self._began = time.perf_counter()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self._wait()
            self.seconds = self.elapsed()

    def elapsed(self) -> float:
        """Return seconds since the context was entered, without waiting for the device."""
        return time.perf_counter() - self._began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def median_ms(
    run: Callable[[], object], device: torch.device, before: Callable[[], object] = lambda: None, ranks: Ranks = ALONE
) -> float:
    """Return the median time of a call in milliseconds, measured by CUDA events on a GPU.

    `before` runs ahead of each call and is not timed. All `ranks` make the same number of calls.
    """
    for _ in range(WARM_UP_CALLS):
        before()
        run()
    if device.type == "cuda":
        # Launch calls without waiting, so that the GPU always has the next one queued and launch time is hidden.
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(MAX_TIMED_CALLS)]
        for start, end in events:
            before()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in events)
    seconds: list[float] = []
    # All ranks must agree when to stop, or the next collective deadlocks: rank 0 decides.
    while len(seconds) < MIN_TIMED_CALLS or ranks.from_first(
        len(seconds) < MAX_TIMED_CALLS and sum(seconds) < MAX_CPU_SECONDS
    ):
        before()
        with Stopwatch(device) as watch:
            run()
        seconds.append(watch.seconds)
    return 1e3 * statistics.median(seconds)


@dataclass(frozen=True)
class Run:
    """One timed call of `generate` on a batch."""

    tokens: list[list[int]]  # new tokens of each output row
    stats: GenerateStats  # in total and per row
    seconds: float  # of the whole call, prefill included
    arrivals: Sequence[Arrival] = ()  # in order; empty if they were not recorded

    @property
    def count(self) -> int:
        """New tokens of all rows."""
        return sum(map(len, self.tokens))

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows per second of the whole call."""
        return self.count / self.seconds

    @property
    def steps(self) -> int:
        """Steps of the batch: the maximum over its rows."""
        return max(row.steps for row in self.stats.rows)

    @property
    def first_token(self) -> float:
        """Seconds from the call to the first new token of any row."""
        return self.arrivals[0][0]


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
    def stats(self) -> Stats:
        """Speculation statistics of the first repeat, summed over its batches."""
        return GenerateStats.from_rows([run.stats for run in self.repeats[0]], None)

    def texts(self, repeat: int = 0) -> list[list[int]]:
        """Return the new token ids of each prompt in a repeat."""
        return [row for run in self.repeats[repeat] for row in run.tokens]

    def add(self, more: "RepeatedRuns") -> None:
        """Add the runs of further batches with the same number of repeats."""
        if more.repeats:
            own = self.repeats or [[]] * len(more.repeats)
            self.repeats = [a + b for a, b in zip(own, more.repeats, strict=True)]

    def speedup(self, plain: "RepeatedRuns") -> float:
        """Return the speedup in tokens per second over `plain`: the median of the ratios of all repeats."""
        return statistics.median(a / b for a, b in zip(self.tokens_per_second, plain.tokens_per_second, strict=True))


class StatsEntries(TypedDict):
    """Speculation statistics in a JSON document, named as in `Stats`."""

    steps: int
    drafted: int
    accepted: int
    emitted: int
    tokens_per_step: float
    accepted_by_depth: list[int]


def describe_stats(stats: Stats) -> StatsEntries:
    """Return the speculation statistics as entries of a JSON document."""
    return {
        "steps": stats.steps,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "emitted": stats.emitted,
        "tokens_per_step": stats.tokens_per_step,
        "accepted_by_depth": stats.accepted_by_depth,
    }


def run_in_turn(
    ways: Sequence[Callable[[PromptIds, int], Run]],
    batches: Sequence[PromptIds],
    repeats: int,
    progress: Callable[[str], None] = lambda text: None,
    *,
    alternate: bool = False,
) -> list[RepeatedRuns]:
    """Decode all batches in all ways `repeats` times, and return the runs of each way.

    Each batch is decoded in every way before the next one, so that other load on the machine affects all ways equally.
    A way is called with a batch and the number of prompts before it; `progress` receives a line before each batch.
    `alternate` reverses the order of the ways in every second repeat.
    """
    ran = [RepeatedRuns() for _ in ways]
    for repeat in range(repeats):
        for way in ran:
            way.repeats.append([])
        first, order = 0, range(len(ways))
        for index, batch in enumerate(batches):
            progress(f"repeat {repeat + 1} of {repeats}, batch {index + 1} of {len(batches)}")
            # The order alternates, so that neither way always runs on a warmer device.
            for way_index in reversed(order) if alternate and repeat % 2 else order:
                ran[way_index].repeats[-1].append(ways[way_index](batch, first))
            first += len(batch)
    return ran


def timed_run(
    engine: Engine, prompts: PromptIds, pad_token: int, watch: Stopwatch | None = None, **arguments: Any
) -> Run:
    """Decode prompts in one timed call of `engine.generate`, with further `arguments` such as a streamer."""
    ids, mask = padded(prompts, pad_token)
    with watch or Stopwatch(engine.target.device) as watch:
        out = engine.generate(ids, mask, return_dict_in_generate=True, **arguments)
    assert isinstance(out, GenerateOutput)
    assert out.stats is not None
    rows = zip(out.sequences[:, ids.shape[1] :].tolist(), out.stats.rows, strict=True)
    # The prefill, which is not a step, produces a row's first token.
    return Run([row[: stats.emitted + 1] for row, stats in rows], out.stats, watch.seconds)


def transformers_run(
    model: Any,
    prompt: Sequence[int],
    seed: int,
    *,
    pad: tuple[int, int] = (0, 0),
    count: bool = False,
    **arguments: Any,
) -> Run:
    """Decode one prompt in one timed call of `model.generate`, with torch's global seed set to `seed`.

    Args:
        model: The model.
        prompt: Token ids.
        seed: The seed.
        pad: Length that the prompt is padded to, and the token that pads it.
        count: Whether to count the forwards of the model as steps; the first one also prefills the prompt.
        arguments: Further arguments of `generate`.
    """
    ids, mask = padded([prompt, [0] * pad[0]], pad[1])  # [2, P]; only the first row is decoded
    ids, mask = (x[:1].to(model.device) for x in (ids, mask))
    forwards: list[None] = []
    # transformers draws from torch's global generator.
    torch.manual_seed(seed)
    # Only with `count`: a hook makes torch.compile recompile a compiled model in each call.
    hook = model.register_forward_hook(lambda *_: forwards.append(None)) if count else nullcontext()
    with hook, Stopwatch(model.device) as watch:
        out = model.generate(ids, attention_mask=mask, **arguments)
    text = out[0, ids.shape[1] :].tolist()
    return Run([text], GenerateStats.from_rows([Stats(steps=len(forwards), emitted=len(text))], None), watch.seconds)


class _Arrivals:
    """A `StepStreamer` that records when each row receives tokens, and how many."""

    def __init__(self, watch: Stopwatch):
        self._watch = watch
        self.noted: list[Arrival] = []

    def put_step(self, row: int, tokens: Sequence[int], accepted: int, ended: bool) -> None:
        self.noted.append((self._watch.elapsed(), row, len(tokens)))

    def end(self) -> None:
        pass


class WorkSettings(Protocol):
    """The options of a command that measures a workload."""

    @property
    def max_new_tokens(self) -> int:
        """New tokens of each row."""

    @property
    def temperature(self) -> float:
        """Sampling temperature; 0 for greedy decoding."""

    @property
    def seed(self) -> int:
        """Seed of the first row."""


@dataclass(frozen=True)
class Workload:
    """Prompts, and how an engine continues them.

    Once checked, every row decodes `max_new_tokens` tokens, or fewer if it reaches one of `ends`.
    """

    engine: ReDrafter
    prompts: PromptIds
    pad_token: int  # pads prompts of a batch to one length
    num_prompts: int  # minimum number of rows measured per batch size; row i continues prompt i modulo their number
    max_new_tokens: int
    temperature: float  # 0 for greedy decoding
    seed: int  # of the first row's draws
    ends: Sequence[int] = ()  # token ids that end a text

    @classmethod
    def from_options(
        cls,
        engine: ReDrafter,
        tokenizer: PreTrainedTokenizerBase,
        prompts: PromptIds,
        options: WorkSettings,
        num_prompts: int = 1,
    ) -> "Workload":
        """Create the workload of a command from its options."""
        pad_token, tokens = pad_token_of(tokenizer), options.max_new_tokens
        return cls(engine, prompts, pad_token, num_prompts, tokens, options.temperature, options.seed)

    def check(self) -> None:
        """Remove end tokens and sampling from the model's generation config; raise `ArgumentError` if no text fits."""
        engine = self.engine
        # Every row should decode the same number of tokens, so that times compare.
        engine.model.generation_config = GenerationConfig(pad_token_id=self.pad_token)
        limit, prompt = engine.options.max_input_len, max(map(len, self.prompts))
        longest = prompt + self.max_new_tokens
        if limit is not None and prompt > limit:
            raise ArgumentError(f"the longest prompt has {prompt} tokens, and --max-input-len is {limit}: raise it")
        for what, most in (("context", engine.target.context), ("max_seq_len", engine.options.max_seq_len)):
            if most is not None and longest > most:
                raise ArgumentError(
                    f"the longest prompt with --max-new-tokens {self.max_new_tokens} comes to {longest} tokens, and "
                    f"the {what} is {most}: lower it, or give shorter prompts"
                )

    @property
    def most_prompt_tokens(self) -> int:
        """Maximum number of prompt tokens that leaves room for the new tokens."""
        options = self.engine.options
        rooms = (most - self.max_new_tokens for most in (self.engine.target.context, options.max_seq_len) if most)
        return min((*rooms, *filter(None, [options.max_input_len])), default=sys.maxsize)

    @property
    def device(self) -> torch.device:
        """The target's device."""
        return self.engine.target.device

    def proposer(self, rows: int, speculate: bool) -> Proposer:
        """Return the proposer that the engine uses for a batch of `rows` rows."""
        return self.engine.proposer_for(rows) if speculate else self.engine.plain

    def batches(self, rows: int) -> list[list[Sequence[int]]]:
        """Return the prompts in batches of `rows` rows, repeated until there are `num_prompts` rows."""
        count = -(-max(self.num_prompts, rows) // rows)
        return [[self.prompts[(i * rows + j) % len(self.prompts)] for j in range(rows)] for i in range(count)]

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for `generate`, under Hugging Face's names."""
        sampling = {"do_sample": True, "temperature": self.temperature, "top_k": 0}  # transformers defaults to 50
        ends = {"eos_token_id": list(self.ends)} if self.ends else {}
        return {"max_new_tokens": self.max_new_tokens} | ends | (sampling if self.temperature else {"do_sample": False})

    def run_batch(self, batch: PromptIds, speculate: bool, *, seed: int = 0) -> Run:
        """Decode a batch in one timed run without cached prefixes; `seed` is added to the workload's seed."""
        # Otherwise a repeated prompt would skip its prefill.
        self.engine.forget_prefixes()
        arrivals = _Arrivals(watch := Stopwatch(self.device))
        arguments = self.arguments() | {"seed": self.seed + seed, "speculate": speculate}
        run = timed_run(self.engine, batch, self.pad_token, watch, streamer=arrivals, **arguments)
        full = (len(row) == self.max_new_tokens or row[-1] in self.ends for row in run.tokens)
        assert all(full), "a row ended early"
        return replace(run, arrivals=arrivals.noted)


def padded(batch: PromptIds, pad_token: int) -> tuple[Tensor, Tensor]:
    """Return the ids and the attention mask of prompts, `[B, P]` int64 each, padded on the left with `pad_token`."""
    rows = [torch.tensor(row, dtype=torch.long) for row in batch]
    ids = pad_sequence(rows, batch_first=True, padding_value=pad_token, padding_side="left")
    ones = [torch.ones_like(row) for row in rows]
    return ids, pad_sequence(ones, batch_first=True, padding_side="left")


def pad_token_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id that pads prompts: the tokenizer's pad token, or else its end token, or 0."""
    return next(token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None)
