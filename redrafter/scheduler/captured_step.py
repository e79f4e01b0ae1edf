"""Steps captured in CUDA graphs where the device supports it, and forwards that are launched but not read yet."""

import atexit
import gc
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from redrafter.attention.tree_plan import PromptChunks
from redrafter.cache.kv_cache import KVCache
from redrafter.cache.paged import KVCachePool, PagedCache
from redrafter.cache.to_device import to_device
from redrafter.drafting.policy import StepRows
from redrafter.drafting.proposer import Proposer, State
from redrafter.errors import first_line, warn
from redrafter.features import ADAPTERS, IMAGES, OWN_DRAFTS
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.model.forward_batch import LogitsReader
from redrafter.model.target import Target
from redrafter.sampling.sampler import Sampler
from redrafter.scheduler.logprobs import score_drawn
from redrafter.scheduler.sequence import SequenceDelta, TokenSequence
from redrafter.step import StepOutput, step

INACTIVE_TOKENS = 64  # committed tokens of each row of an inactive step, which attention reads


def bucket(rows: int) -> int:
    """Return how many rows a step is captured for: the next power of two up to 64, then the next multiple of 64."""
    return 1 << (rows - 1).bit_length() if rows <= 64 else -(-rows // 64) * 64


@cache
def capture_stream(gpu: int) -> torch.cuda.Stream:
    """Return the stream on which steps of a GPU are captured, as graphs share freed memory within one stream only."""
    return torch.cuda.Stream(gpu)  # torch's default is one stream of the GPU that captures first, for all GPUs


def capture(
    run: Callable[[], object], other: torch.cuda.CUDAGraph | None = None, *, watched: bool = False
) -> torch.cuda.CUDAGraph:
    """Capture `run` in a CUDA graph, after a call that pays for what only first calls pay for.

    The graph shares memory with the other graph, if there is one. It is `watched` where another thread asks the device
    for events meanwhile, as NCCL's does that watches collectives.
    """
    # A first call compiles kernels and allocates workspaces, which cannot be captured. CUDA requires a side stream for
    # it.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph, stream = torch.cuda.CUDAGraph(), capture_stream(torch.cuda.current_device())
    pool = None if other is None else other.pool()
    # In the mode "global", a call of another thread that is not allowed during capture would break the capture.
    mode = "thread_local" if watched else "global"
    # A collection might free a graph, and freeing one ends the process while another is captured.
    with collection_paused(), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
        run()
    return graph


@contextmanager
def collection_paused() -> Iterator[None]:
    """Let the garbage collector wait for the end of the context."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class HostCopy:
    """A tensor that the device may still be computing, on its way to the host."""

    def __init__(self, x: Tensor):
        """Launch the copy of a tensor of any shape."""
        self._copied: torch.cuda.Event | None = None
        self._host = x
        if x.is_cuda:
            # Pinned memory of its own: later copies may arrive before this one is read.
            self._host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self._host.copy_(x, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    @property
    def on_host(self) -> bool:
        """Return whether the numbers are on the host already, so that `wait` returns at once."""
        return self._copied is None

    def wait(self) -> Tensor:
        """Wait for the numbers, and return them on the host."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host


class StepKey(NamedTuple):
    """Key of a captured step.

    Attributes:
        rows: How many rows.
        window: Positions of each row that it reads.
        sampling: Key of the sampling operations, from `SamplingTensors.kind`.
        proposer: Id of the proposer.
        chunks: Number of prompt chunks that it has room for.
        keeps_logits: Whether it keeps logits and scores, which are as large as the vocabulary.
        adapters: Version of the adapters' stacks; 0 for no adapter.
        reader: Id of the reader of its logits.
    """

    rows: int
    window: int
    sampling: Hashable
    proposer: int
    chunks: int
    keeps_logits: bool
    adapters: int
    reader: int


@dataclass(eq=False)
class CapturedStep:
    """A step over buffers with fixed addresses: write to them, replay, read the report.

    Attributes:
        state: Buffers of the rows; an inactive row does not advance, and writes only to the unowned block 0.
        proposer: The proposer.
        target: The model that verifies.
        cache: The target's keys and values of the rows.
        sampler: Buffers of how the rows draw.
        draft_cache: The draft model's keys and values of the rows, or None.
        chunks: Buffers of the prompt chunks read together with the rows, or None.
        read_drafts: Reads these chunks into the draft model's cache before the step; None for none, or no such model.
        reader: Stores the logits of each step for later drafts; None where drafts read none.
        keeps_logits: Whether the output has logits and scores.
        output: The output of the last replay. The next replay overwrites it. Logits and scores are empty unless they
            were asked for: a graph would hold them for good, in addition to those of every other graph.
        packed: Its report, as in `StepReport`, overwritten likewise.
        num_bytes: Bytes of the logits and scores that the step holds.
        graph: The captured step; None where it cannot be captured and runs as it is.
        ran: Whether it has run, so that a run pays for nothing that only first ones pay for.
    """

    state: State
    proposer: Proposer
    target: Target
    cache: KVCache
    sampler: Sampler
    draft_cache: KVCache | None = None
    chunks: PromptChunks | None = None
    read_drafts: Callable[[], object] | None = None
    reader: LogitsReader | None = None
    keeps_logits: bool = True
    graph: torch.cuda.CUDAGraph | None = None
    ran: bool = False
    num_bytes: int = 0
    output: StepOutput = field(init=False)
    packed: Tensor = field(init=False)

    def run_step(self) -> None:
        """Take the step uncaptured, in place."""
        self.ran = True
        if self.read_drafts is not None:
            self.read_drafts()
        state, self.output = step(
            self.state,
            self.proposer,
            self.target,
            self.cache,
            self.sampler,
            draft_cache=self.draft_cache,
            chunks=self.chunks,
            reader=self.reader,
            keeps_logits=self.keeps_logits,
        )
        # In place: a replay reads and writes the buffers that it was captured with.
        self.state.length.copy_(state.length)
        self.state.hidden.copy_(state.hidden)
        self.packed = self.output.report.packed
        logits, scores = self.output.logits, self.output.scores
        self.num_bytes = logits.nbytes + (0 if scores is logits else scores.nbytes)

    def replay(self) -> HostCopy:
        """Launch one step without waiting for it, and return the copy of its packed report."""
        if self.graph is None:
            self.run_step()
        else:
            self.graph.replay()
        return HostCopy(self.packed)


def new_state(target: Target, rows: int, width: int) -> State:
    """Return inactive rows, with room for sequences of `width` tokens."""
    # A row is inactive until `RunningBatch.add` writes it, so zeros are never read as a sequence.
    with target.device:
        tokens = torch.zeros(rows, width, dtype=torch.long)
        length = torch.zeros(rows, dtype=torch.long)
        hidden = torch.zeros(rows, target.feature_size, dtype=target.dtype)
        features = (ADAPTERS, OWN_DRAFTS, IMAGES) if target.images.support.ok else (ADAPTERS, OWN_DRAFTS)
        inputs = {feature: torch.zeros_like(length) for feature in features}
        active = torch.zeros(rows, dtype=torch.bool)
        return State(tokens=tokens, length=length, hidden=hidden, active=active, inputs=inputs)


def inactive_step(target: Target, store: KVCachePool, proposer: Proposer, rows: int) -> CapturedStep:
    """Return a step of inactive rows with `INACTIVE_TOKENS` committed tokens each, which draw greedily.

    It writes only to the unowned block 0 of the target's `store`.
    """
    blocks = -(-(INACTIVE_TOKENS + proposer.scratch_slots + proposer.depth + 2) // BLOCK_SIZE)
    state = replace(new_state(target, rows, blocks * BLOCK_SIZE), inputs={})
    state.length.fill_(INACTIVE_TOKENS)
    with target.device:
        table = torch.zeros(rows, blocks, dtype=torch.int32)
        zeros = torch.zeros(rows, dtype=torch.long)
        ids = torch.arange(target.vocab_size)
        sampler = Sampler(seeds=None, processors=(), temperature=torch.ones(rows), prompt=zeros, limit=zeros, ids=ids)
    return CapturedStep(state, proposer, target, PagedCache(store, table, zeros), sampler, keeps_logits=False)


class GraphCapturer:
    """Captures steps of one target. Graphs share memory: copy a step's output before another step is launched."""

    def __init__(self, target: Target):
        self._target, self._capturable = target, True
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        if target.ranks.size > 1:
            # NCCL destroys no communicator before all graphs with its collectives, so the exit would wait forever.
            # Functions run at exit in reverse order, and the group was opened earlier.
            atexit.register(_reset, self._graphs)

    def capture(self, step: CapturedStep) -> None:
        """Capture a step if possible, else return it uncaptured. All rows of its buffers must be inactive."""
        if not step.sampler.capturable or not self._capturable or self._target.device.type != "cuda":
            return
        if self._target.hooked:  # a draft model may have hooks: its drafts change no token of the output
            return
        try:
            other = next(iter(self._graphs), None)  # their memory is freed with the last of them
            step.graph = capture(step.run_step, other, watched=self._target.ranks.size > 1)
            self._graphs.add(step.graph)
        # The model can be captured; only now there is too little memory.
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._capturable = False
            # The failed capture may have left work in flight that must end before uncaptured steps use the buffers.
            torch.cuda.synchronize()
            warn(
                f"{self._target.name} cannot run in a CUDA graph ({first_line(error)}): its steps are launched one by "
                "one, slower; where it has experts, experts_implementation='batched_mm' at loading may help"
            )


def _reset(graphs: Iterable[torch.cuda.CUDAGraph]) -> None:
    for graph in graphs:
        graph.reset()


@dataclass(frozen=True)
class LaunchedStep:
    """A forward that draws tokens of sequences: a step, or the draws after prompts that were read.

    Attributes:
        sequences: The sequences of its first R rows.
        packed: The copy of its report, as in `StepReport`.
        logits: Logits along the accepted path, `[K+1, V]`, of the rows whose sequences want them.
        scores: Processed logits, likewise.
        logprobs: The results of `score_drawn` for the rows whose sequences want them: of K+1 tokens each, or of those
            drawn where the report is on the host. None if there are no such rows.
        levels: Levels of drafts.
        grafted: Nodes of each row's tree that were copied from the sequence.
        proposer: The proposer of the drafts; None for the draws after prompts.
        rows: The rows that the proposer was chosen for; None likewise.
        accepted: Accepted drafts of each row that took drafts and had not ended, once `read_deltas` has read it.
        limits: Levels of drafts that each of these could accept.
    """

    sequences: Sequence[TokenSequence]
    packed: HostCopy
    logits: Mapping[int, Tensor]
    scores: Mapping[int, Tensor]
    logprobs: tuple[HostCopy, HostCopy] | None
    levels: int
    grafted: int
    proposer: Proposer | None = None
    rows: StepRows | None = None
    accepted: list[int] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)

    @classmethod
    def from_output(
        cls,
        sequences: Sequence[TokenSequence],
        output: StepOutput,
        packed: HostCopy,
        proposer: Proposer | None = None,
        step_rows: StepRows | None = None,
        *,
        needs_logits: bool = True,
    ) -> "LaunchedStep":
        """Copy what will be needed from a step's output, which the next step may overwrite.

        Without `needs_logits`, no sequence needs more than its tokens.
        """
        logits, scores = dict[int, Tensor](), dict[int, Tensor]()
        counts = dict[int, int]()
        # Only the rows that asked for them: logits are as large as the vocabulary.
        for row, sequence in enumerate(sequences if needs_logits else ()):
            if "logits" in sequence.request.keeps:
                # A copy, since the next replay overwrites the output.
                logits[row] = output.logits[row].index_select(0, output.path.nodes[row])
            if "scores" in sequence.request.keeps:
                scores[row] = output.scores[row].index_select(0, output.path.nodes[row])
            if sequence.request.params.logprobs is not None:
                counts[row] = sequence.request.params.logprobs
        logprobs = None
        tokens = output.report.tokens
        if counts:
            # A GPU scores the entries after the drawn tokens too, since the host does not know their number yet.
            sizes = dict.fromkeys(counts, tokens.shape[1])
            if packed.on_host:
                accepted = output.report.accepted.tolist()
                sizes = {row: accepted[row] + 1 for row in counts}
            index = [(row, depth) for row, size in sizes.items() for depth in range(size)]
            rows, depths = to_device(index, tokens.device, torch.long).unbind(1)  # [T]
            nodes = output.path.nodes[rows, depths]
            values, ids = score_drawn(output.logits, rows, nodes, tokens[rows, depths], count=max(counts.values()))
            logprobs = HostCopy(values), HostCopy(ids)
        return cls(sequences, packed, logits, scores, logprobs, output.levels, output.grafted, proposer, step_rows)

    def read_deltas(self) -> Iterator[tuple[TokenSequence, SequenceDelta]]:
        """Wait for the step, and yield the tokens drawn for each of its sequences.

        Those of quiet sequences that continue are appended here: a delta and its way take most of a row's time.
        """
        report = self.packed.wait().numpy()  # an array makes lists in half the time of a tensor
        rows = zip(self.sequences, report[:, :-4].tolist(), *report[:, -4:].T.tolist(), strict=False)  # without padding
        scored = zip(*(each.wait().tolist() for each in self.logprobs or ()), strict=True)
        drafts, detailed = self.levels > 0, bool(self.logits or self.scores or self.logprobs)
        plain = self.proposer is not None and not self.grafted and not detailed
        for row, (sequence, tokens, accepted, drafted, finite, copied) in enumerate(rows):
            count, overflowed = (finite, True) if finite <= accepted else (accepted + 1, False)
            new, params = tokens[:count], sequence.request.params
            if took := drafts and params.speculate and not sequence.ended:
                self.accepted.append(max(count - 1, 0))
                limit = params.num_speculative_tokens
                self.limits.append(self.levels if limit is None else min(limit, self.levels))
            if plain and sequence.quiet and not (overflowed or sequence.ended):
                text = sequence.tokens
                if len(text) + count < sequence.max_length and params.stop_token_ids.isdisjoint(new):
                    sequence.launched, sequence.unread_copies = sequence.launched - 1, 0
                    sequence.stats.count(drafted if took else None, accepted, count)
                    text += new
                    continue
            drawn = SequenceDelta(new, copied=copied, overflowed=overflowed)
            if took:
                drawn.drafted, drawn.copies = drafted, min(self.grafted, drafted)
            if detailed:  # most steps are not, and each line here runs for every row of every step
                drawn.logits, drawn.scores = (x[row][:count] if row in x else None for x in (self.logits, self.scores))
                if (wanted := sequence.request.params.logprobs) is not None:
                    lines = list(islice(scored, accepted + 1 if self.packed.on_host else len(tokens)))[:count]
                    drawn.logprobs = [(own, dict(zip(ids[:wanted], top, strict=False))) for (own, *top), ids in lines]
            yield sequence, drawn


@dataclass(frozen=True)
class LaunchedForward:
    """A step, or a forward over chunks of prompts, whose tokens the host has not read.

    Attributes:
        draws: The step, or the draws of the tokens that follow prompts; None where no prompt is complete.
        timer: Measures the forward; None where its time is of no use.
        use_seconds: Called with the seconds of the forward before its tokens are reported; None likewise.
    """

    draws: LaunchedStep | None
    timer: "Timer | None" = None
    use_seconds: Callable[[float], object] | None = None


class Timer:
    """Measures work on a device without waiting for it."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter):
        """Begin to measure the work launched from now on, by the host's clock where the device is the host."""
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._events[0].record()
        self._clock = clock
        self._began = clock()
        self._ended: float | None = None

    def stop(self) -> None:
        """Measure nothing that is launched later."""
        self._ended = self._clock()
        if self._events is not None:
            self._events[1].record()

    @property
    def seconds(self) -> float:
        """Duration of the work. Waits for it to end."""
        assert self._ended is not None, "stop comes first"
        if self._events is None:
            return self._ended - self._began
        began, ended = self._events
        ended.synchronize()
        return began.elapsed_time(ended) / 1e3
