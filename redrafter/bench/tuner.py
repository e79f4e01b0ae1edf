"""The measurements of `redrafter tune`: tokens per step of each tree, and its step times by batch size.

Tokens per step do not depend on the batch size, and the time of a step does not depend on which tokens it writes. So
each tree continues the prompts once, and a few of its steps are timed at each batch size. Where rows share nodes,
tokens per step depend on how many there are for each row, so such a tree has as many for each at every size.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from redrafter.bench.standing_batch import OneProposer, make_request, opened
from redrafter.bench.tree_choice import SHARING_ROWS, Timing, at_size, deeper, nodes_per_row, shape_of
from redrafter.drafting.proposer import Proposer
from redrafter.drafting.search_proposer import SearchProposer
from redrafter.engine.decoding import decode
from redrafter.engine.outputs import GenerateOutput
from redrafter.engine.recurrent import ReDrafter
from redrafter.engine.request import Request
from redrafter.errors import ArgumentError, CacheFullError
from redrafter.measure.run import Stopwatch

__all__ = ["Tuner"]

MAX_BATCH_NODES = 1024  # nodes of a batch in one forward; past it any GPU is bound by arithmetic
WARM_UP_STEPS, TIMED_STEPS = 2, 10
MAX_WRITING_PROMPTS = 32  # prompts that each tree continues
MAX_WRITING_ROWS = 16  # of them, at once
HOPELESS_RATIO = 1.05  # a tree that a smaller one beats by this will not catch up in a larger batch
NO_MEMORY = (CacheFullError, torch.OutOfMemoryError)
UNLIMITED_TOKENS = 1 << 30


class Tuner:
    """Measures trees until all are measured or the time is over; plain decoding and one tree are measured in any case.

    Attributes:
        timings: What was measured.
        open_sizes: Batch sizes at which something was left out for want of time.
    """

    def __init__(
        self,
        engine: ReDrafter,
        prompts: Sequence[Sequence[int]],
        *,
        batch_sizes: Sequence[int],
        max_new_tokens: int,
        temperature: float,
        seed: int,
        seconds: float,
        report: Callable[[str], None],
    ):
        """Set up a tuner.

        Args:
            engine: The engine to tune.
            prompts: Token ids of the prompts.
            batch_sizes: Batch sizes to measure at.
            max_new_tokens: Tokens that each tree writes after a prompt, to count tokens per step.
            temperature: 0 for greedy decoding.
            seed: Seed of the first row's draws.
            seconds: Time to measure for, counted from behind the first step.
            report: Called with each line of progress.
        """
        self.engine, self.prompts, self.report = engine, prompts, report
        self.sizes = sorted(set(batch_sizes))
        self.max_new_tokens, self.temperature, self.seed, self.seconds = max_new_tokens, temperature, seed, seconds
        limits = (engine.target.context, engine.options.max_seq_len)
        self._longest = min((limit for limit in limits if limit is not None), default=UNLIMITED_TOKENS)
        self._max_input = engine.options.max_input_len or self._longest
        self.timings: list[Timing] = []
        self.open_sizes: set[int] = set()
        self._rows, self._deadline = MAX_WRITING_ROWS, float("inf")

    def run(self, trees: Sequence[SearchProposer], deeper_lengths: Sequence[int] = ()) -> None:
        """Measure trees in their order, then deeper ones while those pay, and add to `timings`.

        Args:
            trees: The trees.
            deeper_lengths: Draft lengths per beam to try after them, from short to long, as `deeper` says.
        """
        # Past its eight shapes torch.compile would compile no more, and steps would be timed uncompiled.
        if self.engine.target.device.type == "cuda":
            import torch._dynamo.config as dynamo_config

            with dynamo_config.patch(recompile_limit=256, accumulated_recompile_limit=4096):
                self._run(trees, deeper_lengths)
        else:
            self._run(trees, deeper_lengths)

    def _run(self, trees: Sequence[SearchProposer], deeper_lengths: Sequence[int]) -> None:
        plain_proposer = self.engine.plain
        self.step_ms(plain_proposer, 1)  # pays for what only a first request pays for: compiling may take minutes
        began = time.monotonic()
        self._deadline = began + self.seconds
        for plain in self._timed(plain_proposer, 1.0, self.sizes, first=True):
            self.report(f"batch {plain.batch}: plain decoding takes {plain.step_ms:.2f} ms a step")
        self.sizes = [timing.batch for timing in self.timings]
        if not self.sizes:
            raise ArgumentError("not even the smallest batch fits into memory: give shorter --prompts")
        self._forget()
        for index, tree in enumerate(self._with_deeper(trees, deeper_lengths)):
            place = f"{index + 1}/{len(trees)}" if index < len(trees) else "deeper"
            name = f"{place}, {_describe(tree)}"
            if index and self._late():
                self.open_sizes |= {size for size in self.sizes if _fits(tree, size)}
                continue
            tokens_per_step = self.tokens_per_step(tree)
            timed = self._timed(tree, tokens_per_step, self._sizes_of(tree), first=not index)
            times = ", ".join(f"{timing.step_ms:.2f} at {timing.batch}" for timing in timed)
            done = time.monotonic() - began
            self.report(
                f"{name}: {tokens_per_step:.2f} tokens a step; ms a step: {times or 'not timed'} ({done:.0f} s)"
            )
            self._forget()
        if self.open_sizes:
            self.report(f"{self.seconds:g} seconds are over; not all was measured (--seconds gives more)")

    def _with_deeper(self, trees: Sequence[SearchProposer], deeper_lengths: Sequence[int]) -> Iterator[SearchProposer]:
        """Yield `trees`, and those of each deeper length once all before them are measured."""
        yield from trees
        for length in deeper_lengths:
            yield from deeper(trees[0], self.timings, length)

    def _sizes_of(self, tree: SearchProposer) -> Iterator[int]:
        """Yield batch sizes to time a tree at, from small to large, until a smaller tree is far ahead."""
        for size in (size for size in self.sizes if _fits(tree, size)):
            yield size
            if any(self._left_behind(self.timings[-1], other) for other in self.timings):
                return

    @staticmethod
    def _left_behind(timing: Timing, other: Timing) -> bool:
        extents, other_extents = _extents(timing), _extents(other)
        smaller = all(a <= b for a, b in zip(other_extents, extents, strict=True))
        faster = other.tokens_per_second > HOPELESS_RATIO * timing.tokens_per_second
        return timing.batch == other.batch and smaller and faster

    def _timed(
        self,
        proposer: Proposer,
        tokens_per_step: float,
        sizes: Sequence[int] | Iterator[int],
        *,
        first: bool,
    ) -> list[Timing]:
        """Time a proposer's steps at rising batch sizes, until memory or the time is over.

        Args:
            proposer: The proposer.
            tokens_per_step: What `tokens_per_step` returned for it.
            sizes: Batch sizes, from small to large.
            first: Whether to time it at the first size even when the time is over.
        """
        timed: list[Timing] = []
        for size in sizes:
            if self._late() and (timed or not first):
                self.open_sizes |= {later for later in self.sizes if later >= size}
                break
            sized = at_size(proposer, size)
            try:
                step_ms = self.step_ms(sized, size)
            except NO_MEMORY:
                self.report(f"a batch of {size} does not fit into memory")
                break
            timed.append(Timing(size, shape_of(sized), tokens_per_step, step_ms))
            self.timings.append(timed[-1])
        return timed

    def tokens_per_step(self, proposer: Proposer) -> float:
        """Return tokens per step over texts of `max_new_tokens` after each prompt, in batches that fit into memory."""
        while True:
            try:
                return self._count_tokens_per_step(proposer)
            except NO_MEMORY:
                if self._rows == 1:
                    raise
            self._rows //= 2

    @torch.inference_mode()
    def _count_tokens_per_step(self, proposer: Proposer) -> float:
        emitted = steps = 0
        eos = self.engine.model.generation_config.eos_token_id
        ends = frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])
        prompts = self.prompts[:MAX_WRITING_PROMPTS]
        models = _SizedProposer.of(self.engine, proposer)
        for start in range(0, len(prompts), self._rows):
            request = self.request(prompts[start : start + self._rows], self.max_new_tokens, ends)
            with self.engine.scheduler_for(request, models=models) as scheduler:
                out = decode(scheduler, request, request.prompts, None)
            assert isinstance(out, GenerateOutput)
            assert out.stats is not None
            emitted, steps = emitted + out.stats.emitted, steps + out.stats.steps
        return emitted / steps if steps else 1.0

    @torch.inference_mode()
    def step_ms(self, proposer: Proposer, size: int) -> float:
        """Return the median time of a step of `size` rows in milliseconds.

        Raises:
            ArgumentError: The context has no room for a single step.
        """
        rows = [self.prompts[row % len(self.prompts)] for row in range(size)]
        request = self.request(rows, (WARM_UP_STEPS + TIMED_STEPS) * (proposer.depth + 1) + 1, frozenset())
        times: list[float] = []
        with opened(self.engine, request, proposer) as (scheduler, _, outcome):
            # All rows take part in all steps: a context of few tokens has room for fewer.
            while len(times) < WARM_UP_STEPS + TIMED_STEPS and not outcome.ended:
                with Stopwatch(self.engine.target.device) as watch:
                    scheduler.step()
                times.append(watch.seconds)
        if not times:
            raise ArgumentError(
                f"the context of {self._longest} tokens has no room for a tree of depth {proposer.depth}"
            )
        return 1000 * statistics.median(times[WARM_UP_STEPS:] or times)

    def request(self, rows: Sequence[Sequence[int]], new: int, eos: frozenset[int]) -> Request:
        """Make a request for `new` tokens after each prompt, with prompts shortened until both fit.

        A text may have as many tokens as the target's context and `max_seq_len` allow. `new` is lowered only if it
        alone leaves no room for a prompt of one token. After that, each prompt loses tokens at its beginning until it
        fits in front of the new ones, and within `max_input_len`.

        Args:
            rows: Token ids of each row's prompt.
            new: New tokens of each row.
            eos: Ids that end a text.
        """
        new = max(min(new, self._longest - 1), 1)
        max_prompt = max(min(self._longest - new, self._max_input), 1)
        texts = [row[-max_prompt:] for row in rows]
        return make_request(self.engine, texts, new, temperature=self.temperature, seed=self.seed, eos=eos)

    def _late(self) -> bool:
        return time.monotonic() > self._deadline

    def _forget(self) -> None:
        """Free the captured steps of a tree that is done with, and their memory."""
        self.engine.drop_graphs()
        if self.engine.target.device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class _SizedProposer(OneProposer):
    """The models of an engine with one proposer, made for the rows that there are.

    Attributes:
        made: What it was made into, by rows; the same object each time, as captured steps are kept by it.
    """

    made: dict[int, Proposer] = field(default_factory=dict)

    def proposer_for(self, rows: int) -> Proposer:
        """Return the proposer for a batch of `rows` rows."""
        return self.made.setdefault(rows, at_size(self.proposer, rows))


def _fits(tree: SearchProposer, size: int) -> bool:
    """Tell whether a tree is to be timed at a batch size."""
    nodes = size * nodes_per_row(shape_of(tree), SHARING_ROWS)
    return nodes <= MAX_BATCH_NODES and (tree.shared_nodes is None or size >= SHARING_ROWS)


def _describe(tree: SearchProposer) -> str:
    nodes = nodes_per_row(shape_of(tree), SHARING_ROWS)
    return f"{tree.beams} x {tree.depth}, {nodes} nodes" + ("" if tree.shared_nodes is None else " a row, shared")


def _extents(timing: Timing) -> tuple[int, int, int]:
    """Return beams, draft length and nodes of a row's tree, with which the work of a step grows."""
    shape = timing.shape
    if shape is None:
        return 0, 0, 1
    assert shape.num_beams
    assert shape.draft_len_per_beam
    return shape.num_beams, shape.draft_len_per_beam, nodes_per_row(shape, timing.batch)
