"""Measure the costs of steps once for an engine, with inactive rows on the unowned block of the cache."""

import logging
import time
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from redrafter.cache.kv_cache import KVCache
from redrafter.drafting.estimates import Curve, StepCosts, time_at
from redrafter.drafting.proposer import PlainProposer, Proposer, SearchProposer, State
from redrafter.model.linear_layers import forward_bytes
from redrafter.sampling.sampler import Sampler
from redrafter.scheduler.captured_step import CapturedStep, Timer, inactive_step
from redrafter.scheduler.paged_memory import PagedMemory
from redrafter.tree.token_tree import Tree, chain

_LOG = logging.getLogger(__name__)
TOKENS = (1, 8, 32, 64, 128, 192, 256, 384, 512, 1024, 2048)  # token counts of steps without drafts
# Row counts of steps with drafts, whose trees have 8 nodes: the time of FP8 products jumps between 64 and 128 tokens.
ROWS = (1, 8, 16, 32, 64, 256)
REPLAYS = 2  # the fastest counts
# A step that takes longer than this is the last one measured of its kind, by type of device.
LONGEST_SECONDS = {"cuda": 1.0, "cpu": 0.05}
LOGITS_SHARE = 0.25  # share of the free memory that logits of a step may take


def measure_step_costs(memory: PagedMemory, search: SearchProposer) -> StepCosts:
    """Time steps of a target with and without drafts, on a paged cache. Every rank calls it.

    Args:
        memory: Paged memory of the target.
        search: The deepest search that steps may make.
    """
    target, began = memory.target, time.monotonic()
    most = TOKENS[-1]
    if target.device.type == "cuda":
        free = torch.cuda.mem_get_info(target.device)[0]
        # Ranks have different free memory, but must launch the same steps.
        most = target.ranks.minimum(int(LOGITS_SHARE * free / (4 * target.vocab_size)))
    with memory.lock, torch.inference_mode():
        timed = _Steps(memory)
        steps = timed.curve(PlainProposer(), (count for count in TOKENS if count <= max(most, 1)))
        trees = timed.curve(_Repeated(), (count for count in ROWS if count * _Repeated.nodes <= most))
        # With one level of drafts and with all levels, both verifying the same nodes, so that the difference is the
        # levels.
        nodes = 1 + min(search.beams, 2)
        one = replace(search, beams=nodes - 1, depth=1, nodes=nodes, shared_nodes=None)
        most = max(steps[-1][0] // nodes, 1)
        first = timed.curve(one, (count for count in ROWS if count <= most))
        whole = first
        if search.depth > 1:
            longer = replace(search, nodes=nodes, shared_nodes=None)
            whole = timed.curve(longer, (count for count, _ in first))
    trees = tuple((count * _Repeated.nodes, seconds) for count, seconds in trees)
    searches = tuple((count, max(seconds - time_at(trees, nodes * count), 0.0)) for count, seconds in first)
    levels = tuple(
        (count * search.beams, max(all_levels - seconds, 0.0) / max(search.depth - 1, 1))
        for (count, seconds), (_, all_levels) in zip(first, whole, strict=False)
    )
    if target.device.type == "cuda":
        torch.cuda.empty_cache()  # releases the logits of many tokens
    reading = 0.0  # on a CPU, attention reads keys and values again for each node, which the trees' curve includes
    if target.device.type == "cuda":  # these sequences are short
        reading = time_to_read(memory, steps[0][1])
    _LOG.info("measured the costs of steps in %.1f s", time.monotonic() - began)
    return target.ranks.from_first(
        StepCosts(steps=steps, trees=trees, searches=searches, levels=levels, reading=reading)
    )


def time_to_read(memory: PagedMemory, step: float) -> float:
    """Return the time that each token in the cache adds to a step, given the time of a step with a short cache.

    A GPU reads weights, keys and values at about the same rate, and a token's keys and values once for all nodes that
    attend to it. Layers with a window are left out: they read no more of a long sequence than of a short one.
    """
    target, layers = memory.target, memory.store.stores
    windows = target.traits.kinds.windows or [0] * len(layers)
    read = [stores[:2] for stores, window in zip(layers, windows, strict=False) if not window]  # keys and values
    slot = sum(store[0].nbytes for stores in read for store in stores)
    return step * slot / forward_bytes(target.model)


class _Repeated:
    """Drafts the pending token repeatedly, so that verification is the only cost."""

    nodes, depth, scratch_slots, model, shared_nodes, without_text, sizes = 8, 7, 8, None, None, None, None

    def propose(
        self, state: State, sampler: Sampler, noise: Tensor | None, cache: KVCache, draft_cache: KVCache | None
    ) -> Tree:
        """Return a chain of pending tokens."""
        return chain(state.pending.expand(-1, self.nodes))


class _Steps:
    """Times steps of inactive rows, which write only to the unowned block."""

    def __init__(self, memory: PagedMemory):
        self._memory, self._target = memory, memory.target
        self._device = memory.target.device

    def curve(self, proposer: Proposer, numbers: Iterable[int]) -> Curve:
        """Return the seconds of steps with these numbers of rows, until one takes too long."""
        found = list[tuple[int, float]]()
        for rows in numbers:
            found.append((rows, self._seconds(proposer, rows)))
            if self._target.ranks.from_first(found[-1][1] > LONGEST_SECONDS[self._device.type]):
                break
        return tuple(found)

    def _seconds(self, proposer: Proposer, rows: int) -> float:
        step = inactive_step(self._target, self._memory.store, proposer, rows)
        self._memory.capturer.capture(step)
        times = [self._time(step) for _ in range(1 + REPLAYS)]
        # The first replay may still load kernels.
        return min(times[1:])

    def _time(self, step: CapturedStep) -> float:
        if self._device.type == "cpu":  # CPU time, which other programs do not change
            began = time.process_time()
            step.replay()
            return time.process_time() - began
        timer = Timer(self._device)
        step.replay()
        timer.stop()
        return timer.seconds
