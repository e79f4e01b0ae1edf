"""The memory of paged KV caches: pools of keys and values, and who holds which blocks of them."""

import logging
import threading
import time
from collections.abc import Sequence
from functools import partial

import torch

from redrafter.cache.block_manager import BlockManager, BlockTable
from redrafter.cache.host_blocks import HostBlocks
from redrafter.cache.kv_cache import stored_as
from redrafter.cache.options import CacheOptions
from redrafter.cache.paged import KVCachePool, PagedCache
from redrafter.cache.states import RowStates
from redrafter.drafting.proposer import SearchProposer
from redrafter.errors import UnsupportedError, first_line, warn
from redrafter.features import BATCH_INVARIANCE, OWNERS_HOOKS, FeatureSet
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.model.batch_invariance import check_rows
from redrafter.model.forward_batch import ForwardBatch
from redrafter.model.target import Target
from redrafter.model.weights import ParkedMemory
from redrafter.scheduler.attention_kernels import AttentionKernels
from redrafter.scheduler.captured_step import GraphCapturer, collection_paused
from redrafter.tree.token_tree import chain

_LOG = logging.getLogger(__name__)
# Tokens of the sequence in each row that the cache is sized for. A longer one takes blocks of others.
PLANNED_ROW_TOKENS = 32768
MOST_ROWS = 64  # rows of such sequences that the paged cache is sized for, where memory allows
MAX_RECOMPILES = 64  # of one function, before torch.compile gives up on it
EXTRA_SLOTS = 256  # of a row beyond its sequence: the tree, and the overshoot of a last step


class PagedMemory:
    """The paged memory of one target and its draft model: pools of keys and values, and who holds which blocks.

    A target and its draft model hold a row's tokens in blocks of the same ids, so one manager of blocks serves both,
    and a prefix that is found is found in both. A draft model with another vocabulary, whose sequences have other
    lengths, has blocks of its own.

    Attributes:
        target: The model that verifies.
        store: The target's keys and values.
        draft_store: A draft model's keys and values, or None.
        blocks: Which blocks are free, taken, and hold a prefix.
        draft_blocks: The same for a draft model with another vocabulary, unused with any other; None without one.
        host: Host blocks that receive the contents of evicted `blocks`; None drops them, as those of `draft_blocks`.
        capturer: Captures steps over this memory.
        lock: Guards `blocks` and launches against schedulers in several threads: graphs share memory, so
            a step's output must be copied before another step is launched.
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
        *,
        compile: bool = False,
    ):
        self.target, self.store, self.draft_store, self.host = target, store, draft_store, host
        self.forget_prefixes()
        self.lock = threading.RLock()
        self.released = threading.Condition(self.lock)
        self.turns = list[object]()
        self.capturer = GraphCapturer(target)
        self._compile, self._weights = (
            compile,
            dict[Target, int](),
        )  # revision of the weights that computed stored prefixes
        target.shared.memories.add(self)

    def forget_prefixes(self) -> None:
        """Drop all prefixes, so that later prompts are read in full. No sequence may hold blocks."""
        on_host = 0 if self.host is None else self.host.num_blocks
        # Either model may have recurrent states, and both keep them in rows of the same numbers.
        with_states = next((store for store in self._stores if store.states is not None), self.store)
        self.blocks = BlockManager(self.store.num_blocks, with_states.rows, on_host, with_states.prefix_states)
        self.draft_blocks: BlockManager | None = None
        # Also without another vocabulary, where it stays unused: rows then share the target's blocks.
        if self.draft_store is not None:
            self.draft_blocks = BlockManager(self.draft_store.num_blocks)

    @property
    def _stores(self) -> list[KVCachePool]:
        return [self.store] if self.draft_store is None else [self.store, self.draft_store]

    @property
    def _states(self) -> list[RowStates]:
        return [store.states for store in self._stores if store.states is not None]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All keys and values on the device, and all recurrent states."""
        pools = [pool for store in self._stores for pool in store.pools]
        return [*pools, *(x for each in self._states for x in (each.position, *each.tensors.values()))]

    def restore_states(self, block_table: BlockTable) -> None:
        """Launch the copy of a stored prefix's recurrent states to a row that begins with it. Hold the lock.

        Work that the row's earlier owner has launched runs before it, and the row's prefill after it.
        """
        for states in self._states if block_table.restored else ():
            states.copy_row(block_table.state_row, block_table.restored)

    def copy_blocks(self) -> None:
        """Launch pending copies between device and host, after blocks were allocated and before they are used.

        Hold the lock. If a copy fails, all prefixes are forgotten, as their contents are unknown.
        """
        try:
            if self.host is not None:
                self.host.copy(self.blocks.take_copies())
        except BaseException:
            # Even on a KeyboardInterrupt: blocks whose copies did not happen must not be found.
            self.forget_texts()
            raise

    def forget_texts(self) -> None:
        """Drop all stored prefixes; sequences keep the blocks that they hold. Hold the lock."""
        for blocks in (self.blocks, self.draft_blocks):
            if blocks is not None:
                blocks.forget()

    def park(self, parked: ParkedMemory) -> None:
        """Release the memory of all keys and values until `parked` is restored, and drop stored prefixes."""
        with self.lock:
            # Keys and values are not kept: moving them to the host would take longer than a prefill.
            parked.park(self.tensors, keep=False)
            self.forget_texts()

    def follow_changes(self, models: Sequence[Target]) -> None:
        """Forget prefixes and prepare forwards that were made with outdated weights of the target and its draft model.

        The models must be up to date already.
        """
        with self.lock:
            now = {model: model.revision.weights for model in models}
            if any(self._weights.get(model, weights) != weights for model, weights in now.items()):
                self.forget_texts()
            self._weights |= now
            for model, store in zip(models, self._stores, strict=False):
                if model.varlen_forward.outdated:
                    prepare(model, store, self._compile)

    @classmethod
    def on(
        cls,
        target: Target,
        draft_model: Target | None = None,
        *,
        options: CacheOptions,
        max_seq_len: int | None,
        rows: int = MOST_ROWS,
        max_rows: int = MOST_ROWS,
        compile: bool = True,
        draft_pieces: int | None = None,
        reuse: bool = True,
        search: SearchProposer | None = None,
    ) -> "PagedMemory":
        """Take memory for keys and values and, on a GPU, prepare the models' forwards.

        Args:
            target: The model that verifies.
            draft_model: A model that drafts on the same device, or None.
            options: How much memory keys and values may take, of the device and of the host, and their format.
            max_seq_len: Most tokens of a sequence; None for the model's context, which is an upper limit.
            rows: Rows of the longest sequence that memory is allocated for, at most.
            max_rows: Most rows at once, for whose recurrent states memory is allocated.
            compile: Whether forwards are compiled.
            draft_pieces: The most tokens of the draft model for one of the target; None where its ids are the target's.
            reuse: Whether stored prefixes are reused.
            search: The deepest search of a drafter of the target; None without one.

        Raises:
            CacheFullError: The device has too little memory.
            ArgumentError: The host has less memory than that.
        """
        longest = min((x for x in (target.context, max_seq_len) if x is not None), default=PLANNED_ROW_TOKENS)
        tokens = max(rows * (min(longest, PLANNED_ROW_TOKENS) + EXTRA_SLOTS), longest + EXTRA_SLOTS)
        models = [target] if draft_model is None else [target, draft_model]
        # A mixer that cannot continue would read the rest after a prefix token by token, slower than all tokens at
        # once.
        keeps = reuse and all(mixer.continues for model in models for mixer in model.traits.mixers)
        stores = KVCachePool.in_free_memory(
            [stored_as(model.paged_shapes, options.kv_dtype) for model in models],
            scales=[1, draft_pieces or 1][: len(models)],
            fraction=options.kv_cache_free_gpu_memory_fraction,
            max_blocks=-(-tokens // BLOCK_SIZE) + rows,
            max_rows=max_rows,
            prefix_states=options.max_prefix_states if keeps else 0,
            ranks=target.ranks,
        )
        for model, store in zip(models, stores, strict=True):
            # Another engine of the target may have prepared it already, and a model may draft for itself.
            if target.device.type == "cuda" and not model.varlen_forward.linears_fused:
                prepare(model, store, compile, search if model is target else None)
        host = _take_host_memory(target, options.host_bytes, stores if draft_pieces is None else stores[:1])
        return cls(target, stores[0], stores[1] if len(stores) > 1 else None, host, compile=compile)


def _take_host_memory(target: Target, num_bytes: int, stores: Sequence[KVCachePool]) -> HostBlocks | None:
    """Return the blocks on the host of pools whose blocks have the same ids; None if unwanted or of no use."""
    why = None
    if any(store.states is not None and not store.prefix_states for store in stores):
        why = "it keeps no recurrent states of prefixes, so no prefix can be reused"
    elif not all(store.pools for store in stores):
        why = "it has only recurrent states, which stay on the device"
    if num_bytes and why is not None:
        warn(f"kv_host_cache_gib is of no use to {target.name}: {why}")
    return None if why is not None or not num_bytes else HostBlocks.of_size(num_bytes, stores)


@torch.inference_mode()
def prepare(target: Target, store: KVCachePool, compile: bool, search: SearchProposer | None = None) -> None:
    """Merge and compile a model's forward, on a small tree whose sizes all differ and so cannot be confused.

    The attention kernels of forwards, and of the drafts of `search`, are compiled too.
    """
    from torch._dynamo import config as dynamo_config  # takes seconds to import

    # Unequal sizes (3 rows, 7 nodes, 5 blocks) let a compiler mark each as a separate dimension.
    zeros = torch.zeros(3, 7, dtype=torch.long, device=target.device)
    cache = PagedCache(store, torch.zeros(3, 5, dtype=torch.int32, device=target.device))
    forward = partial(target.verify, ForwardBatch(chain(zeros), zeros[:, 0], cache))
    attention = AttentionKernels()
    with attention:
        target.varlen_forward.fuse_linears(forward)
    if search is not None:
        attention.record_drafts(target, store, search)
    # Fused weights have new addresses, which must not count as a change of the weights.
    target.note_state()
    compile = compile and all(mixer.tokens_alone for mixer in target.traits.mixers)
    if hooked := target.hooked:
        FeatureSet(f"{target.name} with a hook on {hooked}", *target.features).check(OWNERS_HOOKS)
        if target.device.type == "cuda":
            warn(
                f"{hooked} has a forward hook, so steps of {target.name} are neither compiled nor captured, slower: "
                "remove the hook, or do what it does in the model's weights"
            )
        compile = False
    target.varlen_forward.compile(compile)
    if compile:
        _LOG.info("compiling %s (--no-compile or compile=False does without)", target.name)
    # The drafter's step is compiled for one row and many, one beam and many, the first step and the others.
    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, MAX_RECOMPILES)
    try:
        # Run once here: a compilation that fails must fail before a request waits for it. Its many objects stay, and
        # scanning them again and again took 5 to 10 % of its time.
        began = time.monotonic()
        with attention.compiling(store), collection_paused():
            forward()
        if compile:
            _LOG.info("compiled %s in %.1f s", target.name, time.monotonic() - began)
    except Exception as error:
        if BATCH_INVARIANCE in target.features:
            message = f"{target.name} cannot be batch-invariant: it cannot be compiled ({first_line(error)})"
            raise UnsupportedError(message) from error
        target.varlen_forward.compile(False)
        warn(
            f"{target.name} cannot be compiled ({first_line(error)}): its steps are captured uncompiled, which is "
            "slower; compile=False avoids this warning"
        )
        return
    if BATCH_INVARIANCE in target.features:
        # Compilers may choose kernels by batch size, so invariance is tested on the compiled forward.
        check_rows(target.varlen_forward, store)
