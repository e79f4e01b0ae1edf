"""Steps captured in CUDA graphs, each of which takes one launch and one small read."""

import gc
import logging
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from redrafter.cache.block_manager import BlockManager
from redrafter.cache.paged import KVCachePool, PagedCache
from redrafter.drafting.proposer import Proposer, State
from redrafter.engine.options import MOST_ROWS, EngineOptions
from redrafter.errors import ArgumentError, first_line
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.sampling.sampler import Sampler
from redrafter.step import step
from redrafter.target.adapters import active_adapters
from redrafter.target.target import Target
from redrafter.tree.token_tree import chain

__all__ = ["CUDAGraphRunner", "CapturedStep", "PendingReport", "bucket", "capture", "new_state", "prepare"]

_LOG = logging.getLogger(__name__)
MAX_TEXT_TOKENS = 32768  # of a text, where nothing says how long texts become
MIN_STEP_POSITIONS = 2048  # that a kept step has room for; longer ones are kept for every power of two
MAX_RECOMPILES = 64  # of one function, before torch.compile gives up on it
EXTRA_SLOTS = 256  # of a row beyond its text: the tree, and what a last step overshoots


def bucket(rows: int) -> int:
    """Return how many rows a step is captured for: the next power of two up to 64, then the next multiple of 64."""
    return 1 << (rows - 1).bit_length() if rows <= 64 else -(-rows // 64) * 64


def capture(run: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
    """Capture `run` in a CUDA graph, after two calls that pay for what only first calls pay for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    collecting = gc.isenabled()
    gc.disable()  # what it would free may be a graph, and freeing one ends the process while another is captured
    try:
        with torch.cuda.graph(graph, pool=pool):
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

    def read(self) -> list[Any]:
        """Wait for the numbers, and return them as nested lists."""
        if self._done is not None:
            self._done.synchronize()
        return self._host.tolist()


class CapturedStep:
    """A step over buffers that stay where they are: load them, replay, read the report.

    Attributes:
        state: Buffers of the rows; a row that is not active stands still on the block that belongs to nobody.
        proposer: What drafts.
        target: The model that verifies.
        cache: The target's keys and values, on a block table of its own.
        sampler: Buffers of how the rows draw.
        draft_cache: The draft model's keys and values on the same block table, or None.
        output: What the last replay drew. The next replay overwrites it.
        report: What `StepOutput.pack_for_host` says of it, `[B, K+2]` int64, overwritten likewise.
        graph: The captured step; None where it cannot be captured and runs as it is.
    """

    def __init__(
        self,
        state: State,
        proposer: Proposer,
        target: Target,
        cache: PagedCache,
        sampler: Sampler,
        draft_cache: PagedCache | None = None,
    ):
        self.state, self.proposer, self.target, self.sampler = state, proposer, target, sampler
        self.cache, self.draft_cache = cache, draft_cache
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        """Take the step uncaptured, in place."""
        state, self.output = step(self.state, self.proposer, self.target, self.cache, self.sampler, self.draft_cache)
        self.state.length.copy_(state.length)
        self.state.hidden.copy_(state.hidden)
        self.report = self.output.pack_for_host()

    def replay(self) -> PendingReport:
        """Launch one step without waiting for it.

        Returns:
            For each row its tokens and, last, the accepted length.
        """
        if self.graph is None:
            self.run()
        else:
            self.graph.replay()
        return PendingReport(self.report)

    def load(self, state: State, table: Tensor, sampler: Sampler) -> None:
        """Copy a batch into the first rows of the buffers. The rows behind it stand still.

        Args:
            state: The batch's rows, at most as many as the buffers have.
            table: Their blocks, `[B, blocks]` int32.
            sampler: How they draw; of the buffers' kind.
        """
        rows = len(state.length)
        self.state.active.zero_()
        self.cache.table.zero_()
        blocks = min(table.shape[1], self.cache.table.shape[1])  # what is cut off belongs to no row that is left
        self.cache.table[:rows, :blocks] = table[:, :blocks]
        self.state.length.zero_()
        for mine, theirs in (
            (self.state.tokens[:, : state.tokens.shape[1]], state.tokens[:, : self.state.tokens.shape[1]]),
            (self.state.length, state.length),
            (self.state.hidden, state.hidden),
            (self.state.active, state.active),
        ):
            mine[:rows] = theirs
        self.sampler.load(sampler)


def new_state(target: Target, rows: int, width: int) -> State:
    """Return rows that stand still, with room for texts of `width` tokens."""
    with target.device:
        tokens, length = torch.zeros(rows, width, dtype=torch.long), torch.zeros(rows, dtype=torch.long)
        hidden = torch.zeros(rows, target.feature_size, dtype=target.dtype)
        return State(tokens, length, hidden, torch.zeros(rows, dtype=torch.bool))


class CUDAGraphRunner:
    """Captured steps of one target, kept from request to request, on one pool of paged memory.

    A target and its draft model hold a row's text in blocks of the same ids, so one manager of blocks serves both,
    and a prefix that is found is found in both.

    Attributes:
        target: The model that verifies.
        store: The target's keys and values.
        draft_store: A draft model's keys and values, or None.
        blocks: Which blocks are free, taken, and hold a prefix.
        kept: Captured steps by what they were captured for.
        lent: Number of steps that are borrowed.
        lock: Guards `blocks`, `kept` and `lent` against requests in several threads.
    """

    def __init__(self, target: Target, store: KVCachePool, draft_store: KVCachePool | None = None):
        self.target, self.store, self.draft_store = target, store, draft_store
        self.blocks = BlockManager(store.num_blocks)
        self.kept: dict[tuple[object, ...], CapturedStep] = {}
        self.lent = 0
        self.lock = threading.RLock()
        self._capturable = True
        self._pool: Any = None
        self._adapters = active_adapters(target.model)

    def check_adapters(self) -> None:
        """Raise `ArgumentError` where the target's adapters changed since the first request.

        Steps and prefixes, which are kept from request to request, were made with the old ones.
        """
        if active_adapters(self.target.model) != self._adapters:
            raise ArgumentError(
                f"the adapters of {self.target.name} changed since the first request; make a new engine of the model"
            )

    @classmethod
    def on(
        cls, target: Target, options: EngineOptions, draft_model: Target | None = None, rows: int = MOST_ROWS
    ) -> "CUDAGraphRunner":
        """Take memory for keys and values and, on a GPU, prepare the models' forwards.

        Args:
            target: The model that verifies.
            options: How much memory may be taken, how long texts become, and whether forwards are compiled.
            draft_model: A model that drafts on the same device, or None.
            rows: Rows of the longest text that memory is taken for, at most.
        """
        longest = min(x for x in (target.context, options.max_seq_len, MAX_TEXT_TOKENS) if x is not None)
        models = [target] if draft_model is None else [target, draft_model]
        stores = KVCachePool.in_free_memory(
            [model.paged_shapes for model in models],
            fraction=options.kv_cache_free_gpu_memory_fraction,
            max_blocks=rows * -(-(longest + EXTRA_SLOTS) // BLOCK_SIZE),
        )
        for model, store in zip(models, stores, strict=True):
            # It may be prepared, by another engine; and a model may draft for itself.
            if target.device.type == "cuda" and not model.varlen_forward.linears_fused:
                prepare(model, store, options.compile)
        return cls(target, *stores)

    def borrow(self, rows: int, proposer: Proposer, sampler: Sampler, width: int) -> "CapturedStep":
        """Return a step for `rows` rows of up to `width` positions and this kind of sampler; see `give_back`.

        Requests share graphs where their processors hold tensors by row alone, whose values are loaded. Other
        processors carry a request's own constants: a step is captured for it alone, as it is for requests that run at
        the same time.
        """
        with self.lock:
            return self._borrow(bucket(rows), proposer, sampler, width)

    def _borrow(self, rows: int, proposer: Proposer, sampler: Sampler, width: int) -> "CapturedStep":
        shared = sampler.by_row and not self.lent
        if shared:
            width = max(MIN_STEP_POSITIONS, 1 << (width - 1).bit_length())
        key = (rows, width, id(proposer), sampler.kind)
        step = self.kept.get(key) if shared else None
        if step is None:
            blocks = -(-(width + proposer.scratch_slots) // BLOCK_SIZE)
            cache = PagedCache(self.store, torch.zeros(rows, blocks, dtype=torch.int32, device=self.target.device))
            step = self.step_over(new_state(self.target, rows, width), proposer, cache, sampler.buffers(rows))
            self.capture(step, self._pool if shared else None)
            if shared:
                self.kept[key] = step
                self._pool = self._pool or (step.graph and step.graph.pool())
        self.lent += 1
        return step

    def step_over(self, state: State, proposer: Proposer, cache: PagedCache, sampler: Sampler) -> CapturedStep:
        """Make a step over these buffers, not captured yet."""
        drafts = None
        if proposer.model is not None and self.draft_store is not None:
            drafts = PagedCache(self.draft_store, cache.table)
        return CapturedStep(state, proposer, self.target, cache, sampler, drafts)

    def capture(self, step: CapturedStep, pool: Any = None) -> None:
        """Capture a step where possible; elsewhere it runs as it is. The rows of its buffers must stand still."""
        if not step.sampler.capturable or not self._capturable or self.target.device.type != "cuda":
            return
        try:
            step.graph = capture(step.run, pool)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._capturable = False
            torch.cuda.synchronize()
            warnings.warn(
                f"{self.target.name} cannot run in a CUDA graph ({first_line(error)}): its steps are launched one by "
                "one, slower; where it has experts, experts_implementation='batched_mm' at loading may help",
                stacklevel=2,
            )

    def give_back(self) -> None:
        """Take back a step that was borrowed."""
        with self.lock:
            self.lent -= 1

    def drop_steps(self) -> None:
        """Forget the captured steps that are kept for later requests, so that their GPU memory can be freed.

        Call it only while no step is borrowed (`lent` is 0); this is not checked. Later requests capture steps anew.
        """
        self.kept.clear()
        self._pool = None  # a pool ends with the last graph in it


@torch.inference_mode()
def prepare(target: Target, store: KVCachePool, compile: bool) -> None:
    """Merge and compile a model's forward, on a small tree whose sizes all differ and so cannot be confused."""
    from torch._dynamo import config as dynamo_config  # takes seconds to import

    zeros = torch.zeros(3, 7, dtype=torch.long, device=target.device)
    cache = PagedCache(store, torch.zeros(3, 5, dtype=torch.int32, device=target.device))
    forward = partial(target.verify, chain(zeros), zeros[:, 0], cache)
    target.varlen_forward.fuse_linears(forward)
    target.varlen_forward.compile(compile)
    if compile:
        _LOG.info(
            "compiling %s, once: about a second a layer (--no-compile or compile=False does without)", target.name
        )
    # The drafter's step is compiled for one row and many, one beam and many, the first step and the others.
    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, MAX_RECOMPILES)
    try:
        forward()
    except Exception as error:
        target.varlen_forward.compile(False)
        warnings.warn(
            f"{target.name} cannot be compiled ({first_line(error)}): its steps are captured as they are, slower; "
            "compile=False avoids this warning",
            stacklevel=2,
        )
