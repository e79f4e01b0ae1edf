"""Compile the attention kernels that later steps launch, in threads, while the main thread compiles a forward.

A kernel has a variant for each way to divide a step into programs, and Triton takes 2 to 4 seconds for one. It releases
Python's interpreter lock for more than nine tenths of that, so it hardly delays Dynamo, which traces the forward
meanwhile. One by one, at the first step of each kind, the variants would add up. A drafter that attends by the same
kernels has variants of its own.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from redrafter.attention.tree_plan import PromptChunks
from redrafter.cache.paged import KVCachePool, PagedCache
from redrafter.cache.to_device import on_device
from redrafter.drafting.proposer import SearchProposer
from redrafter.drafting.tree_choice import WIDTHS
from redrafter.errors import first_line
from redrafter.kernels.attention_inputs import TOKEN_MULTIPLE, TOKENS_PER_CHUNK, AttentionInputs
from redrafter.model.target import Target
from redrafter.model.varlen_forward import ATTENTION_OPERATORS
from redrafter.scheduler.captured_step import inactive_step
from redrafter.tree.token_tree import chain

_LOG = logging.getLogger(__name__)


class StepSize(NamedTuple):
    """Describes the attention of a step: rows, nodes of each one's tree, and prompt chunks."""

    rows: int
    nodes: int
    chunks: int = 0


# Sizes whose variants are those of all steps of a start, for 1 to 32 key heads that 1 to 8 query heads share each.
SIZES = (
    StepSize(1, 1, chunks=4),
    *(StepSize(1, nodes) for nodes in (4, 8, 16, 32)),
    *(StepSize(64, nodes) for nodes in (4, 8, 16, 32)),
    *(StepSize(256, nodes) for nodes in (1, 4)),
)
TABLE_BLOCKS = 8  # of each row; all tables of up to 2,048 tokens have the same variants
DRAFT_ROWS = (1, 64)  # rows of drafts, with several splits of each row and with one
_SMALLEST_TILE = 16  # queries of the smallest tile, which fewer queries share


class AttentionKernels(TorchDispatchMode):
    """Records how each kind of layer calls attention, and compiles the kernels of such calls of other sizes.

    As a context manager it records the calls of a forward, and runs them unchanged.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls = dict[object, tuple[OpOverload, tuple[Any, ...], Mapping[str, Any]]]()
        self._draft_calls = dict[object, Callable[[], object]]()
        self._drafting = False

    def __torch_dispatch__(
        self, function: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, and record it if it is attention of a new kind of layer."""
        kwargs = kwargs or {}
        if isinstance(function, OpOverload) and function.name() in ATTENTION_OPERATORS:
            query, key, value, keys = args[:4]
            widths = tuple(x.shape[1:] for x in (query, key, value))
            # Sinks are weights, so only whether there are any is the kind.
            settings = tuple(isinstance(x, Tensor) or x for x in (*args[15:], *kwargs.values()))
            kind = function, widths, keys.dtype, settings
            if self._drafting:
                inputs = AttentionInputs.from_arguments(*args, **kwargs)
                rows, nodes, new, _ = inputs.rows.sizes
                tile = max(1 << (new * inputs.heads[1] - 1).bit_length(), _SMALLEST_TILE)
                self._draft_calls.setdefault((kind, rows, tile, nodes > new), partial(function, *args, **kwargs))
                return inputs.new_output().zero_()
            self._calls.setdefault(kind, (function, args, kwargs))
        return function(*args, **kwargs)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let functions be compiled that the forward calls: the mode changes no operator."""
        return True

    def record_drafts(self, target: Target, store: KVCachePool, search: SearchProposer) -> None:
        """Record how the drafts of few rows and of many attend, for all numbers of beams that steps choose from.

        The drafts are of inactive rows and uncompiled. Their attention returns zeros and is not computed.
        """
        self._drafting = True
        try:
            # Engines of few rows may lack the memory for the logits of many, and then need no such kernels.
            with self, suppress(torch.OutOfMemoryError):
                for beams, rows in product({min(width, search.beams) for width in (*WIDTHS, search.beams)}, DRAFT_ROWS):
                    nodes = min(search.nodes, 1 + beams * search.depth)
                    proposer = replace(search, beams=beams, nodes=nodes, shared_nodes=None, compiled=False)
                    step = inactive_step(target, store, proposer, rows)
                    proposer.propose(step.state, step.sampler, None, step.cache, None)
        finally:
            self._drafting = False

    @contextmanager
    def compiling(self, store: KVCachePool) -> Iterator[None]:
        """Compile the kernels of `SIZES` in threads during the context, and wait for them at its end.

        Each is launched on rows without tokens in the cache, which write to the unowned block 0 of `store`. Nothing may
        be captured in the context, as a capture fails if another thread loads a kernel.
        """
        runs: list[Callable[[], object]] = [
            partial(self._attend, store, size, *call) for size in SIZES for call in self._calls.values()
        ]
        runs += self._draft_calls.values()
        if not runs:
            yield
            return
        with ThreadPoolExecutor(min(len(runs), os.cpu_count() or 1), "redrafter-kernels") as threads:
            launched = [threads.submit(self._launch, run, store.pools[0].device) for run in runs]
            yield
        # They hold tensors of a forward and of drafts.
        self._calls.clear()
        self._draft_calls.clear()
        errors = (each.exception() for each in launched)
        for line in {first_line(error) for error in errors if error is not None}:
            # A step that launches this kernel fails likewise, if there is one, and raises the error.
            _LOG.warning("an attention kernel cannot be compiled: %s", line)

    @staticmethod
    @torch.inference_mode()  # which holds in one thread alone, as the device does
    def _launch(run: Callable[[], object], device: torch.device) -> None:
        with on_device(device):
            run()

    @staticmethod
    def _attend(
        store: KVCachePool, size: StepSize, function: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        query, key, value, *pools = args[:7]
        device = query.device
        tokens = size.rows * size.nodes + size.chunks * TOKENS_PER_CHUNK
        tokens += -tokens % TOKEN_MULTIPLE
        table = torch.zeros(size.rows, TABLE_BLOCKS, dtype=torch.int32, device=device)
        ids = torch.zeros(size.rows, size.nodes, dtype=torch.long, device=device)
        chunks = PromptChunks.room(size.chunks, TABLE_BLOCKS, device)
        plan = PagedCache(store, table).plan(chain(ids), ids[:, 0], windows=(), chunks=chunks, tokens=tokens)
        new = (x.new_zeros(tokens, *x.shape[1:]) for x in (query, key, value))
        function(*new, *pools, *plan.tensors, *args[15:], **kwargs)
