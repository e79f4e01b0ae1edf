"""Steps that are captured in CUDA graphs where a device can, and forwards that are launched and not read yet."""

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from redrafter.attention.tree_plan import PromptChunks
from redrafter.cache.kv_cache import KVCache
from redrafter.cache.to_device import to_device
from redrafter.drafting.proposer import Proposer, State
from redrafter.errors import first_line
from redrafter.features import ADAPTERS, IMAGES
from redrafter.model.target import Target
from redrafter.sampling.sampler import Sampler
from redrafter.scheduler.logprobs import score_drawn
from redrafter.scheduler.sequence import SequenceDelta, TokenSequence
from redrafter.step import StepOutput, step
from redrafter.tree.likelihood import LIKELIHOODS


def bucket(rows: int) -> int:
    """Return how many rows a step is captured for: the next power of two up to 64, then the next multiple of 64."""
    return 1 << (rows - 1).bit_length() if rows <= 64 else -(-rows // 64) * 64


def capture(run: Callable[[], object], pool: Any = None, *, watched: bool = False) -> torch.cuda.CUDAGraph:
    """Capture `run` in a CUDA graph, after a call that pays for what only first calls pay for.

    The graph shares memory with others through `pool`. It is `watched` where another thread asks the device for events
    meanwhile, as NCCL's does that watches collectives.
    """
    # A first call compiles kernels and allocates workspaces, which cannot be captured; CUDA asks for another stream for
    # it.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    collecting = gc.isenabled()
    gc.disable()  # it might free a graph, and freeing one ends the process while another is captured
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local" if watched else "global"):
            run()
    finally:
        if collecting:
            gc.enable()
    return graph


class PendingReport:
    """Numbers that the device is still computing, on their way to the host."""

    def __init__(self, numbers: Tensor):
        """Launch the copy of `numbers`, a tensor of any shape."""
        self._done: torch.cuda.Event | None = None
        self._host = numbers
        if numbers.is_cuda:
            # Pinned memory of its own: later copies may arrive before this one is read.
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

        self._read: list[Any] | None = None

    @property
    def on_host(self) -> bool:
        """Return whether the numbers are on the host already, so that `read` does not wait."""
        return self._done is None

    def read(self) -> list[Any]:
        """Wait for the numbers, and return them as nested lists."""
        if self._read is None:
            if self._done is not None:
                self._done.synchronize()
            self._read = self._host.tolist()
        return self._read


class CapturedStep:
    """A step over buffers that stay where they are: write to them, replay, read the report.

    Attributes:
        state: Buffers of the rows; an inactive row does not advance, and writes only to the unowned block 0.
        proposer: The proposer.
        target: The model that verifies.
        cache: The target's keys and values of the rows.
        sampler: Buffers of how the rows draw.
        draft_cache: The draft model's keys and values of the rows, or None.
        chunks: Buffers of the prompt chunks read together with the rows, or None.
        output: The output of the last replay. The next replay overwrites it. Logits and scores are empty unless they
            were asked for: a graph would hold them for good, in addition to those of every other graph.
        report: The same packed by `StepOutput.pack_for_host`, overwritten likewise.
        graph: The captured step; None where it cannot be captured and runs as it is.
        ran: Whether it has run, so that a run pays for nothing that only first ones pay for.
    """

    def __init__(
        self,
        state: State,
        proposer: Proposer,
        target: Target,
        cache: KVCache,
        sampler: Sampler,
        draft_cache: KVCache | None = None,
        chunks: PromptChunks | None = None,
        *,
        keeps_logits: bool = True,
    ):
        self._keeps_logits = keeps_logits
        self.state, self.proposer, self.target, self.sampler = state, proposer, target, sampler
        self.cache, self.draft_cache, self.chunks = cache, draft_cache, chunks
        self.graph: torch.cuda.CUDAGraph | None = None
        self.ran = False

    def run(self) -> None:
        """Take the step uncaptured, in place."""
        self.ran = True
        caches = self.cache, self.sampler, self.draft_cache
        state, self.output = step(
            self.state, self.proposer, self.target, *caches, self.chunks, keeps_logits=self._keeps_logits
        )
        # In place: a replay reads and writes the buffers that it was captured with.
        self.state.length.copy_(state.length)
        self.state.hidden.copy_(state.hidden)
        self.report = self.output.pack_for_host()

    @property
    def num_bytes(self) -> int:
        """Bytes of the logits and scores that the step holds."""
        output = getattr(self, "output", None)  # none before the first run
        return (
            0 if output is None else output.logits.nbytes + output.scores.nbytes * (output.scores is not output.logits)
        )

    def replay(self) -> PendingReport:
        """Launch one step without waiting for it.

        Returns:
            For each row what `StepOutput.pack_for_host` says of it.
        """
        if self.graph is None:
            self.run()
        else:
            self.graph.replay()
        return PendingReport(self.report)


def new_state(target: Target, rows: int, width: int, piece: int = 0) -> State:
    """Return inactive rows, with room for sequences of `width` tokens and for `piece` tokens of earlier ones."""
    with target.device:
        tokens, length = torch.zeros(rows, width, dtype=torch.long), torch.zeros(rows, dtype=torch.long)
        hidden = torch.zeros(rows, target.feature_size, dtype=target.dtype)
        features = (ADAPTERS, IMAGES) if target.images.ok else (ADAPTERS,)
        inputs = {feature: torch.zeros_like(length) for feature in features}
        active = torch.zeros(rows, dtype=torch.bool)
        pieces = torch.zeros(rows, piece, dtype=torch.long) if piece else None
        return State(tokens, length, hidden, active, inputs, pieces)


class GraphCapturer:
    """Captures steps of one target. Graphs share memory: copy a step's output before another step is launched."""

    def __init__(self, target: Target):
        self._target, self._capturable = target, True
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def capture(self, step: CapturedStep) -> None:
        """Capture a step if possible, else return it uncaptured. All rows of its buffers must be inactive."""
        if not step.sampler.capturable or not self._capturable or self._target.device.type != "cuda":
            return
        if self._target.hooked:  # a hook of a draft model changes no token
            return
        try:
            pool = next((graph.pool() for graph in self._graphs), None)  # which ends with the last graph in it
            step.graph = capture(step.run, pool, watched=self._target.ranks.size > 1)
            self._graphs.add(step.graph)
        # The model can be captured; only now there is too little memory.
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._capturable = False
            torch.cuda.synchronize()
            warnings.warn(
                f"{self._target.name} cannot run in a CUDA graph ({first_line(error)}): its steps are launched one by "
                "one, slower; where it has experts, experts_implementation='batched_mm' at loading may help",
                stacklevel=2,
            )


@dataclass(frozen=True)
class LaunchedStep:
    """A forward that draws tokens of sequences: a step, or the draws after prompts that were read.

    Attributes:
        sequences: The sequences of its first R rows.
        report: For each row what `StepOutput.pack_for_host` says of it.
        logits: Logits along the accepted path, `[K+1, V]`, of the rows whose sequences want them.
        scores: Processed logits, likewise.
        logprobs: The results of `score_drawn` for the rows whose sequences want them: of K+1 tokens each, or of those
            drawn where the report is on the host. None if there are no such rows.
        levels: Levels of drafts.
        grafted: Nodes of each row's tree that were copied from the sequence.
        size: Rows that it was made for.
        proposer: The proposer of the drafts; None for the draws after prompts.
        timer: Measures the step; None for a step whose time corrects nothing.
        correct: Called with the seconds of the step once it was read; None likewise.
    """

    sequences: Sequence[TokenSequence]
    report: PendingReport
    logits: Mapping[int, Tensor]
    scores: Mapping[int, Tensor]
    logprobs: tuple[PendingReport, PendingReport] | None
    levels: int
    grafted: int
    size: int
    proposer: Proposer | None = None
    timer: "Timer | None" = None
    correct: Callable[[float], object] | None = None

    @classmethod
    def of(
        cls,
        sequences: Sequence[TokenSequence],
        output: StepOutput,
        report: PendingReport,
        proposer: Proposer | None = None,
        *,
        needs_logits: bool = True,
    ) -> "LaunchedStep":
        """Take what will be needed of a step's output, which the next step may overwrite.

        Without `needs_logits`, no sequence needs more than its tokens.
        """
        logits, scores = dict[int, Tensor](), dict[int, Tensor]()
        counts, logprobs = dict[int, int](), None
        for row, sequence in enumerate(sequences if needs_logits else ()):
            if "logits" in sequence.keeps:
                # A copy, since the next replay overwrites the output.
                logits[row] = output.logits[row].index_select(0, output.path.nodes[row])
            if "scores" in sequence.keeps:
                scores[row] = output.scores[row].index_select(0, output.path.nodes[row])
            if sequence.params.logprobs is not None:
                counts[row] = sequence.params.logprobs
        if counts:
            # A GPU scores the entries after the drawn tokens too, since the host does not know their number yet.
            width, known = output.tokens.shape[1], report.read() if report.on_host else None
            sizes = {row: width if known is None else known[row][width] + 1 for row in counts}
            index = [(row, place) for row, size in sizes.items() for place in range(size)]
            rows, places = to_device(index, output.tokens.device, torch.long).unbind(1)  # [T]
            nodes, tokens = output.path.nodes[rows, places], output.tokens[rows, places]
            values, ids = score_drawn(output.logits, rows, nodes, tokens, max(counts.values()))
            logprobs = PendingReport(values), PendingReport(ids)
        of_tree = output.levels, output.grafted, len(output.tokens)
        return cls(sequences, report, logits, scores, logprobs, *of_tree, proposer)

    def outcomes(self) -> list[list[int]]:
        """Wait for the step, and return the counts of its drafts by likelihood, as `count_outcomes` has them."""
        flat, count = list(chain.from_iterable(self.report.read()[self.size :])), len(LIKELIHOODS)
        searched = self.levels - self.grafted
        return [flat[at * count : (at + 1) * count] for at in range(2 + searched)]

    def read(self) -> Iterator[tuple[TokenSequence, SequenceDelta]]:
        """Wait for the step, and yield the tokens drawn for each of its sequences."""
        reports = zip(self.sequences, self.report.read(), strict=False)
        scored = zip(*(each.read() for each in self.logprobs or ()), strict=True)
        drafts, detailed = self.levels > 0, bool(self.logits or self.scores or self.logprobs)
        for row, (sequence, line) in enumerate(reports):
            accepted, drafted, finite, copied = line[-4:]
            count = min(accepted + 1, finite)
            drawn = SequenceDelta(line[:count], copied=copied, overflowed=finite <= accepted)
            if drafts and sequence.params.speculate:
                drawn.drafted, drawn.copies = drafted, self.grafted
            if detailed:  # most steps are not, and each line here is run for every row of every step
                drawn.logits, drawn.scores = (x[row][:count] if row in x else None for x in (self.logits, self.scores))
                if (wanted := sequence.params.logprobs) is not None:
                    lines = list(islice(scored, accepted + 1 if self.report.on_host else len(line) - 4))[:count]
                    drawn.logprobs = [(own, dict(zip(ids[:wanted], top, strict=False))) for (own, *top), ids in lines]
            yield sequence, drawn


@dataclass(frozen=True)
class LaunchedPrefill:
    """A forward over chunks of prompts.

    Attributes:
        first: The draws of the tokens that follow prompts; None where none is complete.
        size: Tokens of the forward, with those of padding; 0 for one whose time is not measured.
        timer: Measures the forward.
    """

    first: LaunchedStep | None
    size: int
    timer: "Timer"


class Timer:
    """Measures work on a device without waiting for it."""

    def __init__(self, device: torch.device):
        """Begin to measure the work launched from now on."""
        self._mark: Callable[[], Any] = time.perf_counter
        if device.type == "cuda":
            self._mark = _recorded_event
        self._began, self._ended = self._mark(), None

    def stop(self) -> None:
        """Measure nothing that is launched later."""
        self._ended = self._mark()

    @property
    def seconds(self) -> float:
        """Duration of the work, which is waited for."""
        assert self._ended is not None, "stop comes first"
        if isinstance(self._ended, float):
            return self._ended - self._began
        self._ended.synchronize()
        return self._began.elapsed_time(self._ended) / 1e3


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
