"""Steps captured in CUDA graphs, each of which takes one launch and one small read."""

import gc
import logging
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from redrafter.attention.tree_plan import PromptChunks
from redrafter.cache.block_manager import BlockManager
from redrafter.cache.dense import stored_as
from redrafter.cache.host_blocks import HostBlocks
from redrafter.cache.paged import KVCache, KVCachePool, PagedCache
from redrafter.drafting.proposer import Proposer, State
from redrafter.errors import UnsupportedError, first_line
from redrafter.files.home import keep_kernels
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.sampling.sampler import Sampler
from redrafter.step import step
from redrafter.target.batch_invariance import check_rows
from redrafter.target.forward_batch import ForwardBatch
from redrafter.target.target import Target
from redrafter.tree.token_tree import chain

_LOG = logging.getLogger(__name__)
MAX_TEXT_TOKENS = 32768  # of a text in each row for which the cache has room; a longer one takes that of others
MOST_ROWS = 64  # rows of such texts that the paged cache has room for, where memory allows
MAX_RECOMPILES = 64  # of one function, before torch.compile gives up on it
EXTRA_SLOTS = 256  # of a row beyond its text: the tree, and what a last step overshoots


def bucket(rows: int) -> int:
    """Return how many rows a step is captured for: the next power of two up to 64, then the next multiple of 64."""
    return 1 << (rows - 1).bit_length() if rows <= 64 else -(-rows // 64) * 64


def capture(run: Callable[[], object], pool: Any = None, *, watched: bool = False) -> torch.cuda.CUDAGraph:
    """Capture `run` in a CUDA graph, after a call that pays for what only first calls pay for.

    Args:
        run: What is captured.
        pool: Memory that the graph shares with others; None for memory of its own.
        watched: Whether another thread asks the device for events meanwhile, as NCCL's does that watches collectives.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    collecting = gc.isenabled()
    gc.disable()  # what it would free may be a graph, and freeing one ends the process while another is captured
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

    def read(self) -> list[Any]:
        """Wait for the numbers, and return them as nested lists."""
        if self._done is not None:
            self._done.synchronize()
        return self._host.tolist()


class CapturedStep:
    """A step over buffers that stay where they are: write to them, replay, read the report.

    Attributes:
        state: Buffers of the rows; a row that is not active stands still on the block that belongs to nobody.
        proposer: What drafts.
        target: The model that verifies.
        cache: The target's keys and values of the rows.
        sampler: Buffers of how the rows draw.
        draft_cache: The draft model's keys and values of the rows, or None.
        chunks: Buffers of what is read of prompts beside the rows, or None.
        output: What the last replay drew. The next replay overwrites it. Logits and scores are empty unless they were
            asked for: a graph would hold them for good, beside those of every other graph.
        report: What `StepOutput.pack_for_host` says of it, `[B, K+4]` int64, overwritten likewise.
        graph: The captured step; None where it cannot be captured and runs as it is.
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

    def run(self) -> None:
        """Take the step uncaptured, in place."""
        state, self.output = step(
            self.state, self.proposer, self.target, self.cache, self.sampler, self.draft_cache, self.chunks
        )
        self.state.length.copy_(state.length)
        self.state.hidden.copy_(state.hidden)
        self.report = self.output.pack_for_host()
        if not self._keeps_logits:
            nothing = self.output.logits.new_empty(0)
            self.output = replace(self.output, logits=nothing, scores=nothing)

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


def new_state(target: Target, rows: int, width: int) -> State:
    """Return rows that stand still, with room for texts of `width` tokens."""
    with target.device:
        tokens, length = torch.zeros(rows, width, dtype=torch.long), torch.zeros(rows, dtype=torch.long)
        hidden = torch.zeros(rows, target.feature_size, dtype=target.dtype)
        shift = torch.zeros_like(length) if target.images.ok else None
        return State(tokens, length, hidden, torch.zeros(rows, dtype=torch.bool), shift, torch.zeros_like(length))


class CUDAGraphRunner:
    """Makes captured steps of one target, on one pool of paged memory.

    A target and its draft model hold a row's text in blocks of the same ids, so one manager of blocks serves both,
    and a prefix that is found is found in both. A draft model with another vocabulary, whose texts have other lengths,
    has blocks of its own.

    Attributes:
        target: The model that verifies.
        store: The target's keys and values.
        draft_store: A draft model's keys and values, or None.
        blocks: Which blocks are free, taken, and hold a prefix.
        draft_blocks: The same for a draft model with another vocabulary, unused with any other; None without one.
        host: Where texts of `blocks` go on, on the host, once they are evicted; None if they are forgotten.
        draft_host: The same for those of `draft_blocks`.
        lock: Guards `blocks`, and whatever is launched, against schedulers in several threads: graphs share memory, so
            what a step drew must be copied before another step is launched.
        released: Condition on `lock`, notified when blocks are given back or `turns` changes.
        turns: Those who wait for blocks that others hold, the first to come first. While anyone waits, nobody else
            takes blocks for another sequence, so that a call of many prompts cannot keep a later one waiting.
    """

    def __init__(
        self,
        target: Target,
        store: KVCachePool,
        draft_store: KVCachePool | None = None,
        host: HostBlocks | None = None,
        draft_host: HostBlocks | None = None,
        *,
        compile: bool = False,
    ):
        self.target, self.store, self.draft_store = target, store, draft_store
        self.host, self.draft_host = host, draft_host
        self.forget_prefixes()
        self.lock = threading.RLock()
        self.released, self.turns = threading.Condition(self.lock), list[object]()
        self._capturable = True
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._compile, self._versions = compile, dict[Target, int]()

    def forget_prefixes(self) -> None:
        """Read the next prompts from the first token on, as if never seen. No sequence may hold blocks."""
        on_host, drafts_on_host = (0 if host is None else host.num_blocks for host in (self.host, self.draft_host))
        self.blocks = BlockManager(self.store.num_blocks, self.store.rows, on_host)
        self.draft_blocks: BlockManager | None = None
        if self.draft_store is not None:
            self.draft_blocks = BlockManager(self.draft_store.num_blocks, host_blocks=drafts_on_host)

    def copy_blocks(self) -> None:
        """Launch the copies from and to the host that are due, once blocks were handed out and before they are used.

        Hold the lock. If one fails, all prefixes are forgotten, as nobody knows which of them are where they should be.
        """
        managers = [(self.blocks, self.host), (self.draft_blocks, self.draft_host)]
        try:
            for blocks, host in managers:
                if blocks is not None and host is not None:
                    host.copy(blocks.take_copies())
        except BaseException:
            for blocks, _ in managers:
                if blocks is not None:
                    blocks.forget()
            raise

    def follow_changes(self, target: Target, draft_model: Target | None) -> tuple[int, ...]:
        """Forget the prefixes, and prepare the forwards, that were made of weights which are no longer the models'.

        Args:
            target: The model that verifies, which has followed its changes.
            draft_model: The same for the model that drafts, if it takes part.

        Returns:
            The versions of the models' forwards: steps that were captured with others are out of date.
        """
        models = [(target, self.store)]
        if draft_model is not None and self.draft_store is not None:
            models.append((draft_model, self.draft_store))
        with self.lock:
            if any(self._versions.get(model, model.version) != model.version for model, _ in models):
                for blocks in (self.blocks, self.draft_blocks):
                    if blocks is not None:
                        blocks.forget()
            for model, store in models:
                self._versions[model] = model.version
                if model.varlen_forward.outdated:
                    prepare(model, store, self._compile)
        return tuple(model.varlen_forward.version for model, _ in models)

    @classmethod
    def on(
        cls,
        target: Target,
        draft_model: Target | None = None,
        *,
        memory_fraction: float,
        max_seq_len: int | None,
        rows: int = MOST_ROWS,
        max_rows: int = MOST_ROWS,
        compile: bool = True,
        draft_pieces: int | None = None,
        host_bytes: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> "CUDAGraphRunner":
        """Take memory for keys and values and, on a GPU, prepare the models' forwards.

        Args:
            target: The model that verifies.
            draft_model: A model that drafts on the same device, or None.
            memory_fraction: Share of the free memory that keys and values may take.
            max_seq_len: Most tokens of a text, where the model's context does not say less; None for what it says.
            rows: Rows of the longest text that memory is taken for, at most.
            max_rows: Most rows at once, whose recurrent states memory is taken for.
            compile: Whether forwards are compiled.
            draft_pieces: The most tokens of the draft model for one of the target; None where its ids are the target's.
            host_bytes: Memory of the host for keys and values that have to leave the device.
            kv_dtype: Format that keys and values are stored in; None for that in which the models compute.

        Raises:
            CacheFullError: The device has too little memory.
            ArgumentError: The host has less memory than that.
        """
        longest = min((x for x in (target.context, max_seq_len) if x is not None), default=MAX_TEXT_TOKENS)
        tokens = max(rows * (min(longest, MAX_TEXT_TOKENS) + EXTRA_SLOTS), longest + EXTRA_SLOTS)
        models = [target] if draft_model is None else [target, draft_model]
        stores = KVCachePool.in_free_memory(
            [stored_as(model.paged_shapes, kv_dtype) for model in models],
            scales=[1, draft_pieces or 1][: len(models)],
            fraction=memory_fraction,
            max_blocks=-(-tokens // BLOCK_SIZE) + rows,
            max_rows=max_rows,
            ranks=target.ranks,
        )
        for model, store in zip(models, stores, strict=True):
            # It may be prepared, by another engine; and a model may draft for itself.
            if target.device.type == "cuda" and not model.varlen_forward.linears_fused:
                prepare(model, store, compile)
        hosts = _take_host_memory(target, host_bytes, [stores] if draft_pieces is None else [[s] for s in stores])
        return cls(target, stores[0], stores[1] if len(stores) > 1 else None, *hosts, compile=compile)

    def capture(self, step: CapturedStep) -> None:
        """Capture a step where possible; elsewhere it runs as it is. The rows of its buffers must stand still."""
        if not step.sampler.capturable or not self._capturable or self.target.device.type != "cuda":
            return
        if self.target.hooked:  # a hook of a draft model changes no token
            return
        try:
            pool = next((graph.pool() for graph in self._graphs), None)  # which ends with the last graph in it
            step.graph = capture(step.run, pool, watched=self.target.ranks.size > 1)
            self._graphs.add(step.graph)
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


def _take_host_memory(target: Target, num_bytes: int, groups: Sequence[Sequence[KVCachePool]]) -> list[HostBlocks]:
    """Return the blocks on the host of each group of pools whose blocks have the same ids; none where none are wanted.

    Args:
        target: The model that verifies.
        num_bytes: Memory of the host.
        groups: The pools.
    """
    if not num_bytes:
        return []
    if any(store.states is not None for stores in groups for store in stores):
        warnings.warn(
            f"kv_host_cache_gib is of no use to {target.name}: a prefix that has recurrent states is never reused",
            stacklevel=2,
        )
        return []
    return HostBlocks.of_size(num_bytes, groups)


@torch.inference_mode()
def prepare(target: Target, store: KVCachePool, compile: bool) -> None:
    """Merge and compile a model's forward, on a small tree whose sizes all differ and so cannot be confused."""
    from torch._dynamo import config as dynamo_config  # takes seconds to import

    keep_kernels()
    zeros = torch.zeros(3, 7, dtype=torch.long, device=target.device)
    cache = PagedCache(store, torch.zeros(3, 5, dtype=torch.int32, device=target.device))
    forward = partial(target.verify, ForwardBatch(chain(zeros), zeros[:, 0], cache))
    target.varlen_forward.fuse_linears(forward)
    target.note_state()  # fused weights are elsewhere
    compile = compile and not target.keeps_states
    if hooked := target.hooked:
        if target.batch_invariant:
            raise UnsupportedError(f"{target.name} cannot be batch-invariant: {hooked} has a forward hook")
        if target.device.type == "cuda":
            warnings.warn(
                f"{hooked} has a forward hook, so steps of {target.name} are neither compiled nor captured, slower: "
                "remove the hook, or do what it does in the model's weights",
                stacklevel=2,
            )
        compile = False
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
        if target.batch_invariant:
            raise UnsupportedError(
                f"{target.name} cannot be batch-invariant: it cannot be compiled ({first_line(error)})"
            ) from error
        target.varlen_forward.compile(False)
        warnings.warn(
            f"{target.name} cannot be compiled ({first_line(error)}): its steps are captured as they are, slower; "
            "compile=False avoids this warning",
            stacklevel=2,
        )
        return
    if target.batch_invariant:
        check_rows(target, store)
