"""Time a step and its parts (draft, verify, rest), with lower bounds: the bytes that each must read by copy bandwidth.

A batch is held at one position in the middle of its sequences, so that the same step can be timed repeatedly.
"""

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from redrafter.cache.kv_cache import LayerShape
from redrafter.drafting.policy import DraftPolicy
from redrafter.drafting.proposer import Proposer, SearchProposer
from redrafter.drafting.tree_choice import SHARING_ROWS
from redrafter.engine.call import GenerateCall
from redrafter.engine.engine import Engine
from redrafter.engine.request import CallRequest
from redrafter.errors import CacheFullError
from redrafter.measure.decode import PromptIds, Stopwatch
from redrafter.model.forward_batch import ForwardBatch
from redrafter.model.linear_layers import forward_bytes
from redrafter.parallel.ranks import ALONE, Ranks
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.captured_step import capture
from redrafter.scheduler.paged_memory import PagedMemory
from redrafter.scheduler.request import GenerationRequest
from redrafter.scheduler.running_batch import RunningBatch
from redrafter.tree.token_tree import Tree

CPU_BUFFER_BYTES = 1 << 28
MAX_GPU_BUFFER_BYTES = 1 << 31
WARM_UP_CALLS = 2  # calls of `median_ms` that are not timed
MAX_TIMED_CALLS = 30  # calls that a median is of
MIN_TIMED_CALLS = 5  # fewest on a CPU, where timing stops after MAX_CPU_SECONDS
MAX_CPU_SECONDS = 0.5


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


def copy_bandwidth(device: torch.device) -> float:
    """Measure the bytes per second, read plus written, of a copy of 256 MiB on a CPU, or up to 2 GiB on a GPU."""
    size = CPU_BUFFER_BYTES
    if device.type == "cuda":
        # Two buffers must fit next to the model; larger ones than the L2 cache measure the memory itself.
        size = min(MAX_GPU_BUFFER_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
    ms = median_ms(lambda: buffers[1].copy_(buffers[0]), device)
    # Return the memory, which the measured batches need.
    buffers.clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return 2 * size / ms * 1e3


def slot_bytes(shapes: Sequence[LayerShape]) -> int:
    """Return the bytes of the keys and values of one token in all layers."""
    return sum(shape.heads * (shape.key_dim + shape.value_dim) * shape.dtype.itemsize for shape in shapes)


class OneProposer:
    """The models of an engine with a single proposer, resized to the batch, as a scheduler takes them."""

    def __init__(self, engine: Engine, proposer: Proposer, sized_for: int = SHARING_ROWS):
        """Create the models; `sized_for` is the batch size that the proposer's shared nodes are meant for."""
        self._sized_for, self.target, self.undrafted = sized_for, engine.target, engine.undrafted
        self.proposer, self.draft_model = proposer, proposer.model
        self.draft_vocabulary = None if proposer.model is None else engine.draft_vocabulary
        self.rejection_sampling, self.logits_reader = engine.rejection_sampling, engine.logits_reader

    def draft_policy(self, sizes: Sequence[int], memory: PagedMemory | None) -> DraftPolicy:
        """Return a policy that drafts with the single proposer in every step."""
        return DraftPolicy({size: self._at_size(size) for size in sizes})

    def _at_size(self, rows: int) -> Proposer:
        """Resize the proposer: nodes that rows share grow with the batch."""
        own = self.proposer
        if not isinstance(own, SearchProposer) or own.shared_nodes is None or rows == self._sized_for:
            return own
        return replace(own, shared_nodes=own.shared_nodes * rows // self._sized_for)


class StandingBatch:
    """A running batch past its prefill, whose state is restored after each step.

    `tokens` and `longest` are the committed tokens of all rows and of the longest row.
    """

    def __init__(self, batch: RunningBatch, device: torch.device):
        lengths = [len(sequence.tokens) - 1 for sequence in batch.rows]
        self.batch, self.device, self.longest, self.tokens = batch, device, max(lengths), sum(lengths)
        self._ranks = batch.target.ranks
        self.captured = batch.prepare_step(batch.describe_rows())
        self.state, self.cache, self.sampler = self.captured.state, self.captured.cache, self.captured.sampler
        self._length, self._hidden = self.state.length.clone(), self.state.hidden.clone()

    def restore(self) -> None:
        """Restore the state of the position. The next step overwrites cache entries past it."""
        self.state.length.copy_(self._length)
        self.state.hidden.copy_(self._hidden)

    def step_ms(self) -> float:
        """Return the median time of the step in milliseconds, launched as in serving."""
        ms = median_ms(self.captured.replay, self.device, before=self.restore, ranks=self._ranks)
        self.restore()
        return ms

    def part_ms(self, part: Callable[[], object]) -> float:
        """Return the median time of `part` in milliseconds, captured if the step is. `part` must not change state."""
        run = part
        if self.captured.graph is not None:
            # Without capture the launch overhead would dominate a small part.
            run = capture(part, watched=self._ranks.size > 1).replay
        return median_ms(run, self.device, ranks=self._ranks)

    def propose(self, proposer: Proposer) -> Callable[[], Tree]:
        """Return a function that proposes a tree for the step; its noise is drawn in advance and not timed."""
        # Steps draw noise once for draft and verification, so it belongs to neither part.
        noise = self.sampler.noise(self.state.length, proposer.depth + 1)
        return lambda: proposer.propose(self.state, self.sampler, noise, self.cache, None)


@dataclass(frozen=True)
class StepWork:
    """Rows that a step is timed on: prompts, the tokens that are decoded after them first, and how they are drawn."""

    engine: Engine
    prompts: PromptIds  # one for each row
    advance: int  # new tokens of the row that is furthest, before the batch is held
    temperature: float = 0.0
    seed: int = 0

    @contextmanager
    def hold(self, proposer: Proposer) -> Iterator[StandingBatch]:
        """Open a batch that is held at one position, and close it when the context exits. Requires inference mode.

        Unlike `generate` it does not check that texts fit the context, since longer ones are timed too.
        """
        rows, lengths = len(self.prompts), [len(prompt) for prompt in self.prompts]
        padded = [[0] * (max(lengths) - len(prompt)) + list(prompt) for prompt in self.prompts]
        new = 2 * self.advance + proposer.depth + 2
        requests = [
            GenerationRequest(prompt, new, SamplingParams(temperature=self.temperature, seed=self.seed + row))
            for row, prompt in enumerate(self.prompts)
        ]
        request = CallRequest(torch.tensor(padded, device="cpu"), requests, self.engine.target.device)
        self.engine.forget_prefixes()
        with self.engine.scheduler_for(request, models=OneProposer(self.engine, proposer, rows)) as scheduler:
            call = GenerateCall(request)
            # The caller holds the batch still, which a step launched ahead would move. Rows hold a sequence only once
            # its prompt was read, so prompts that a step could read are read here too.
            scheduler.overlap = scheduler.mixed_prefill = False
            scheduler.longest = sys.maxsize
            with call.queued(scheduler):
                scheduler.prefill()
                if scheduler.running_set.waiting:
                    raise CacheFullError(f"there is no memory for {rows} rows at once")
                while max(len(row.text) for row in call.rows) < self.advance:
                    scheduler.step()
                yield StandingBatch(scheduler.batch, self.engine.target.device)
        self.engine.forget_prefixes()


@torch.inference_mode()
def measure_step(work: StepWork, proposer: Proposer, bandwidth: float) -> Mapping[str, Any]:
    """Time one step with a proposer, and its parts; return them under their names in `Record`.

    A floor is the bytes of a part divided by `bandwidth`, in bytes per second.
    """
    target = work.engine.target
    proposer = proposer.without_text or proposer  # copying drafts from the text takes negligible time
    with work.hold(proposer) as batch:
        step = batch.step_ms()
        propose = batch.propose(proposer)
        tree = propose()
        verify = batch.part_ms(lambda: target.verify(ForwardBatch(tree, batch.state.length, batch.cache)))
        draft = floor = None
        if isinstance(proposer, SearchProposer):
            draft, floor = batch.part_ms(propose), 1e3 * proposer.draft_bytes / bandwidth
        read = forward_bytes(target.model) + batch.tokens * slot_bytes(target.shapes)
        drafting = {"nodes": proposer.nodes, "step_ms": step, "draft_ms": draft, "draft_floor_ms": floor}
        rest = {"verify_floor_ms": 1e3 * read / bandwidth, "rest_ms": step - (draft or 0.0) - verify}
        return drafting | rest | {"verify_ms": verify}
