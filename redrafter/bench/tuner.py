"""Measure trees for `redrafter tune`, and choose the fastest for each batch size.

Tokens per step do not depend on the batch size, and the time of a step does not depend on its tokens. So each tree
continues the prompts once, and a few of its steps are timed at each batch size. If rows share nodes, tokens per step
depend on the nodes per row, so such a tree has the same number of nodes per row at every batch size.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypedDict

import torch

from redrafter.bench.standing_batch import OneProposer, at_size, make_request, opened
from redrafter.checkpoints.tokenizers import end_tokens
from redrafter.drafting.estimates import SHARING_ROWS, trees
from redrafter.drafting.policy import MARGIN
from redrafter.drafting.proposer import Proposer, SearchProposer
from redrafter.engine.call import GenerateCall, GenerateOutput
from redrafter.engine.request import Request
from redrafter.errors import ArgumentError, CacheFullError
from redrafter.measure.run import PromptIds, Stopwatch, Workload
from redrafter.tree.sizes import TreeShape

LENGTHS = (3, 5)  # draft lengths per beam that are tried
DEEPER_LENGTHS = (7, 10)  # tried one after the other, while a tree of the longest length so far is the fastest
NODE_BUDGETS = (4, 8, 16)  # tried in addition to all nodes of the lattice
SHARED_NODES_PER_ROW = (2, 4, 8)  # of trees whose rows share nodes, on average
MAX_BATCH_NODES = 1024  # nodes of a batch in one forward; above it any GPU is compute-bound
WARM_UP_STEPS, TIMED_STEPS = 2, 10
MAX_WRITING_PROMPTS = 32  # prompts that each tree continues
MAX_WRITING_ROWS = 16  # of them, at once
HOPELESS_RATIO = 1.05  # a tree slower than a smaller one by this factor does not catch up in a larger batch
NO_MEMORY = (CacheFullError, torch.OutOfMemoryError)
UNLIMITED_TOKENS = 1 << 30


class TimingEntry(TypedDict):
    """A timing in JSON documents."""

    batch: int
    shape: dict[str, int | None] | None
    tokens_per_step: float
    step_ms: float
    tokens_per_second: float


class TableRow(TimingEntry):
    """A row of the table of `redrafter tune`: the timing of the chosen tree, compared with plain decoding."""

    plain_tokens_per_second: float
    ratio: float  # of tokens per second
    step_cost: float  # time of a step relative to a step of plain decoding


@dataclass(frozen=True)
class Timing:
    """One tree, or plain decoding, at one batch size."""

    batch: int  # rows
    shape: TreeShape | None  # None for plain decoding
    tokens_per_step: float  # new ones of a row
    step_ms: float  # median time of a step

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows per second, prefill excluded."""
        return 1000 * self.batch * self.tokens_per_step / self.step_ms

    def to_dict(self) -> TimingEntry:
        """Return the timing as JSON holds it, with its tokens per second."""
        return {
            "batch": self.batch,
            "shape": None if self.shape is None else self.shape.to_dict(),
            "tokens_per_step": self.tokens_per_step,
            "step_ms": self.step_ms,
            "tokens_per_second": self.tokens_per_second,
        }


class Tuner:
    """Measures undrafted decoding and trees at several batch sizes.

    Attributes:
        timings: The measurements so far.
    """

    def __init__(self, work: Workload, sizes: Iterable[int], seconds: float | None, report: Callable[[str], None]):
        """Create a tuner for batches of these sizes; `report` receives lines of progress.

        `seconds` limits the time after the first step; None for no limit.
        """
        self.work, self.engine, self.report = work, work.engine, report
        self.sizes, self.seconds = sorted(set(sizes)), seconds
        limits = (self.engine.target.context, self.engine.options.max_seq_len)
        self._longest = min((limit for limit in limits if limit is not None), default=UNLIMITED_TOKENS)
        self._max_input = self.engine.options.max_input_len or self._longest
        self.timings: list[Timing] = []
        self._rows, self._deadline, self._measured_trees = MAX_WRITING_ROWS, math.inf, 0

    def measure_trees(self, trees: Sequence[SearchProposer], deeper_lengths: Sequence[int] = ()) -> None:
        """Measure trees in order, then trees of `deeper_lengths` in ascending order while they are faster.

        Raises `ArgumentError` if the time limit ends before all trees are measured: the fastest of some trees says
        nothing about the others.
        """
        patch: AbstractContextManager[object] = nullcontext()
        if self.work.device.type == "cuda":
            from torch._dynamo import config  # takes seconds to import

            # By default torch.compile stops recompiling after eight shapes, and steps would be timed uncompiled.
            patch = config.patch(recompile_limit=256, accumulated_recompile_limit=4096)
        with patch:
            self._measure_trees(trees, deeper_lengths)

    def _measure_trees(self, trees: Sequence[SearchProposer], deeper_lengths: Sequence[int]) -> None:
        plain_proposer = self.engine.plain
        self.step_ms(plain_proposer, 1)  # excludes one-time work from the time limit: compiling may take minutes
        began = time.monotonic()
        self._deadline = math.inf if self.seconds is None else began + self.seconds
        for plain in self._timed(plain_proposer, 1.0, self.sizes):
            self.report(f"batch {plain.batch}: plain decoding takes {plain.step_ms:.2f} ms a step")
        # Larger batches did not fit into memory even without a tree.
        self.sizes = [timing.batch for timing in self.timings]
        if not self.sizes:
            raise ArgumentError("not even the smallest batch fits into memory: give shorter --prompts")
        self._forget()
        longer = (tree for length in deeper_lengths for tree in deeper(trees[0], self.timings, length))
        for index, tree in enumerate(chain(trees, longer)):
            place = f"{index + 1}/{len(trees)}" if index < len(trees) else "deeper"
            shared = "" if tree.shared_nodes is None else " a row, shared"
            nodes = f"{nodes_per_row(shape_of(tree), SHARING_ROWS)} nodes{shared}"
            self._check_time()
            tokens_per_step = self.tokens_per_step(tree)
            timed = self._timed(tree, tokens_per_step, self._sizes_of(tree))
            times = ", ".join(f"{timing.step_ms:.2f} at {timing.batch}" for timing in timed)
            self.report(
                f"{place}, {tree.beams} x {tree.depth}, {nodes}: {tokens_per_step:.2f} tokens a step; ms a step: "
                f"{times or 'not timed'} ({time.monotonic() - began:.0f} s)"
            )
            self._measured_trees += 1
            self._forget()

    def _sizes_of(self, tree: SearchProposer) -> Iterator[int]:
        """Yield batch sizes to time a tree at in ascending order, until a smaller tree is much faster."""
        for size in (size for size in self.sizes if _fits(tree, size)):
            yield size
            # Larger batches favour small trees even more, so stop here.
            if any(_left_behind(self.timings[-1], other) for other in self.timings):
                return

    def _timed(self, proposer: Proposer, tokens_per_step: float, sizes: Iterable[int]) -> list[Timing]:
        """Time a proposer's steps at ascending batch sizes, while they fit into memory."""
        timed: list[Timing] = []
        for size in sizes:
            self._check_time()
            sized = at_size(proposer, size)
            try:
                step_ms = self.step_ms(sized, size)
            except NO_MEMORY:
                self.report(f"a batch of {size} does not fit into memory")
                # Sizes are sorted, so no larger one fits either.
                break
            timed.append(Timing(size, shape_of(sized), tokens_per_step, step_ms))
            self.timings.append(timed[-1])
        return timed

    @torch.inference_mode()
    def tokens_per_step(self, proposer: Proposer) -> float:
        """Return tokens per step over `max_new_tokens` tokens after each prompt, in batches that fit into memory."""
        emitted = steps = 0
        ends = frozenset(end_tokens(self.engine.model))
        prompts = self.work.prompts[:MAX_WRITING_PROMPTS]
        # A single proposer for all batches, so that steps are captured once.
        models = OneProposer(self.engine, proposer)
        for start in range(0, len(prompts), self._rows):
            request = self.request(prompts[start : start + self._rows], self.work.max_new_tokens, ends)
            try:
                with self.engine.scheduler_for(request, models=models) as scheduler:
                    out = GenerateCall(request).decode(scheduler)
            except NO_MEMORY:
                if self._rows == 1:
                    raise
                break
            assert isinstance(out, GenerateOutput)
            assert out.stats is not None
            emitted, steps = emitted + out.stats.emitted, steps + out.stats.steps
        else:
            return emitted / steps if steps else 1.0
        self._rows //= 2  # outside of the handler: its exception references tensors and would keep their memory
        return self.tokens_per_step(proposer)

    @torch.inference_mode()
    def step_ms(self, proposer: Proposer, size: int) -> float:
        """Return the median time of a step of `size` rows in milliseconds."""
        rows = [self.work.prompts[row % len(self.work.prompts)] for row in range(size)]
        request = self.request(rows, (WARM_UP_STEPS + TIMED_STEPS) * (proposer.depth + 1) + 1)
        times: list[float] = []
        # Prefill happens on entry and is not timed.
        with opened(self.engine, request, proposer, sized_for=size) as (scheduler, call):
            # Every timed step must include all rows, so stop when one ends: a short context has room for fewer steps.
            while len(times) < WARM_UP_STEPS + TIMED_STEPS and not call.ended:
                with Stopwatch(self.work.device) as watch:
                    scheduler.step()
                times.append(watch.seconds)
        if not times:
            raise ArgumentError(
                f"the context of {self._longest} tokens has no room for a tree of depth {proposer.depth}"
            )
        return 1000 * statistics.median(times[WARM_UP_STEPS:] or times)

    def request(self, rows: PromptIds, new: int, eos: frozenset[int] = frozenset()) -> Request:
        """Create a request for `new` tokens after each prompt, ended by ids of `eos`, with prompts cut to fit.

        A sequence is limited by the target's context and `max_seq_len`. `new` is lowered only if it leaves no room for
        a prompt of one token. Each prompt is then truncated on the left to fit together with the new tokens, and into
        `max_input_len`.
        """
        new = max(min(new, self._longest - 1), 1)
        max_prompt = max(min(self._longest - new, self._max_input), 1)
        return make_request(self.work, [row[-max_prompt:] for row in rows], new, eos)

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise ArgumentError(
                f"--seconds {self.seconds:g} ended after {self._measured_trees} trees, before all were measured, so no "
                "table is written: leave it out or give more, or give fewer --batch-sizes, --beams and --lengths"
            )

    def _forget(self) -> None:
        self.engine.drop_graphs()
        if self.work.device.type == "cuda":
            torch.cuda.empty_cache()


def _fits(tree: SearchProposer, size: int) -> bool:
    nodes = size * nodes_per_row(shape_of(tree), SHARING_ROWS)
    return nodes <= MAX_BATCH_NODES and (tree.shared_nodes is None or size >= SHARING_ROWS)


def _left_behind(timing: Timing, other: Timing) -> bool:
    """Return whether a tree with no more work per step is so much faster that this one cannot catch up."""
    smaller = all(a <= b for a, b in zip(_extents(other), _extents(timing), strict=True))
    faster = other.tokens_per_second > HOPELESS_RATIO * timing.tokens_per_second
    return timing.batch == other.batch and smaller and faster


def _extents(timing: Timing) -> tuple[int, int, int]:
    """Return beams, draft length and nodes per row of a tree, which determine the work of a step."""
    beams, depth = (0, 0) if timing.shape is None else (timing.shape.beams, timing.shape.depth)
    return beams, depth, nodes_per_row(timing.shape, timing.batch)


def candidates(
    own: SearchProposer, beams: Sequence[int], lengths: Sequence[int], *, share: bool = False
) -> list[SearchProposer]:
    """Return the trees to measure: every lattice at several node budgets, the pair's own first, then by size.

    With `share`, includes trees whose nodes `SHARING_ROWS` rows share; `at_size` resizes them. Numbers of beams above
    the drafter's vocabulary are left out.
    """
    # A search cannot keep more beams than there are ids.
    vocabulary = own.drafter.config.num_draft_ids
    widths, search = [width for width in beams if width <= vocabulary], (own.beams, own.depth)
    tried = dict.fromkeys(trees(widths, lengths, NODE_BUDGETS))
    if own.beams in widths and own.depth in lengths:
        tried |= dict.fromkeys(trees([own.beams], [own.depth], (own.nodes,)))
    for mean in SHARED_NODES_PER_ROW if share else ():
        # A row gets `mean` nodes on average: limit the width to that, and the depth to its binary logarithm.
        narrow, depth = {min(width, mean) for width in widths}, min(max(lengths), mean.bit_length())
        shared = trees(narrow, [depth], (), (mean,), SHARING_ROWS)
        tried |= dict.fromkeys(shape for shape in shared if shape.shared_nodes is not None)
    ordered = sorted(tried, key=lambda each: ((each.beams, each.depth) != search, nodes_per_row(each, SHARING_ROWS)))
    return [
        replace(own, beams=each.beams, depth=each.depth, nodes=each.nodes, shared_nodes=each.shared_nodes)
        for each in ordered
    ]


def deeper(own: SearchProposer, timings: Sequence[Timing], length: int) -> list[SearchProposer]:
    """Return the trees to measure with `length` tokens per beam, more than in any tree so far.

    They have the widths of the deepest trees that are the fastest at some batch size; if there are none, deeper trees
    are not worth measuring. Each has the nodes of such a tree, or all nodes of its lattice.
    """
    deepest = max(_extents(timing)[1] for timing in timings)
    # Only trees that were chosen at the greatest depth may gain from a greater one.
    sizes = set[tuple[int, int]]()
    for shape in choose(timings).values():
        if shape is not None and shape.depth == deepest and shape.shared_nodes is None:
            sizes |= {(shape.nodes, shape.beams), (1 + shape.beams * length, shape.beams)}
    return [
        replace(own, beams=beams, depth=length, nodes=nodes, shared_nodes=None)
        for nodes, beams in sorted(sizes)
        if nodes > length  # fewer nodes reach no draft at that depth
    ]


def shape_of(proposer: Proposer) -> TreeShape | None:
    """Return the shape of a proposer's tree; None for plain decoding."""
    if not isinstance(proposer, SearchProposer):
        return None
    return TreeShape(proposer.beams, proposer.depth, proposer.nodes, proposer.shared_nodes)


def nodes_per_row(shape: TreeShape | None, batch: int) -> int:
    """Return the average number of nodes that a step verifies per row of a batch."""
    if shape is None:
        return 1
    return shape.nodes if shape.shared_nodes is None else shape.shared_nodes // batch


def choose(timings: Sequence[Timing]) -> dict[int, TreeShape | None]:
    """Return the fastest tree by batch size; None if no tree is `MARGIN` times as fast as undrafted decoding."""
    shapes = {}
    for plain in (timing for timing in timings if timing.shape is None):
        trees = [timing for timing in timings if timing.batch == plain.batch and timing.shape is not None]
        best = max(trees, key=lambda timing: timing.tokens_per_second, default=plain)
        worth = best.tokens_per_second >= MARGIN * plain.tokens_per_second
        shapes[plain.batch] = best.shape if worth else None
    return shapes


def table(timings: Sequence[Timing], shapes: dict[int, TreeShape | None]) -> list[TableRow]:
    """Return a row per batch size: the timing of the tree chosen, plain decoding's speed, and both ratios to plain.

    `step_cost` is the time of a step relative to a step of plain decoding.
    """
    by_key = {(timing.batch, timing.shape): timing for timing in timings}
    rows: list[TableRow] = []
    for batch, shape in sorted(shapes.items()):
        chosen, plain = by_key[batch, shape], by_key[batch, None]
        rows.append(
            TableRow(
                **chosen.to_dict(),
                plain_tokens_per_second=plain.tokens_per_second,
                ratio=chosen.tokens_per_second / plain.tokens_per_second,
                step_cost=chosen.step_ms / plain.step_ms,
            )
        )
    return rows
