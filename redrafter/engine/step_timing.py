"""Measure the costs of steps once for an engine, with inactive rows on the unowned block of the cache."""

import logging
import time
from dataclasses import replace

import torch

from redrafter.drafting.proposer import Proposer, SearchProposer, UndraftedProposer
from redrafter.drafting.step_times import StepCosts, time_at
from redrafter.model.linear_layers import forward_bytes
from redrafter.scheduler.captured_step import Timer, inactive_step
from redrafter.scheduler.paged_memory import PagedMemory

_LOG = logging.getLogger(__name__)
TOKENS = (1, 8, 32, 64, 128, 192, 256, 384, 512, 1024, 2048)  # token counts of steps without drafts
ROWS = (1, 8, 32, 64, 256)  # row counts of steps with drafts
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
        most = max(target.ranks.minimum(int(LOGITS_SHARE * free / (4 * target.vocab_size))), 1)
    nodes = 1 + min(search.beams, 2)  # verified after all levels, so that little but the levels is measured
    few = replace(search, nodes=nodes, shared_nodes=None)
    with memory.lock, torch.inference_mode():
        forward = tuple((rows, _seconds(memory, UndraftedProposer(), rows)) for rows in TOKENS if rows <= most)
        searched = tuple((rows, _seconds(memory, few, rows)) for rows in ROWS if rows * nodes <= max(most, nodes))
    level = tuple(
        (rows * search.beams, max(seconds - time_at(forward, rows * nodes), 0.0) / search.depth)
        for rows, seconds in searched
    )
    reading = 0.0
    if target.device.type == "cuda":
        torch.cuda.empty_cache()  # releases the logits of many tokens
        reading = time_to_read(memory, forward[0][1])  # the sequences of these steps are short
    _LOG.info("measured the costs of steps in %.1f s", time.monotonic() - began)
    return target.ranks.from_first(StepCosts(forward, level, reading))


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


def _seconds(memory: PagedMemory, proposer: Proposer, rows: int) -> float:
    """Return the time of a step of inactive rows: the faster of two, after one that may load kernels."""
    step = inactive_step(memory.target, memory.store, proposer, rows)
    memory.capturer.capture(step)
    step.replay()
    times = list[float]()
    for _ in range(2):
        timer = Timer(memory.target.device)
        step.replay()
        timer.stop()
        times.append(timer.seconds)
    return min(times)
