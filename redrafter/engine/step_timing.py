"""Measure the costs of steps, with inactive rows on the unowned block of the cache, and keep them for later starts."""

import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from math import isfinite

import torch
from torch import nn

from redrafter.drafting.proposer import UNDRAFTED, Proposer, SearchProposer
from redrafter.drafting.step_times import StepCosts, time_at
from redrafter.files.home import KeptResults
from redrafter.model.linear_layers import forward_bytes
from redrafter.scheduler.captured_step import Timer, inactive_step
from redrafter.scheduler.paged_memory import PagedMemory
from redrafter.version import __version__

_LOG = logging.getLogger(__name__)
# Token counts of steps without drafts. With weights in groups, 17 tokens take as long as 32: an 8B's forward on an H200
# 2.6, 2.8, 3.9 and 5.5 ms up to 8, 16, 32 and 64, and 10.3 with 65. Lines between these hide it: simulated, they make
# trees of 24 tokens for 4 rows and 48 for 16, with 0.96 and 0.88 times the tokens/s of those with 32 and 64.
TOKENS = (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 192, 256, 384, 512, 1024, 2048)
ROWS = (1, 8, 32, 64, 256)  # row counts of steps with drafts
LOGITS_SHARE = 0.25  # share of the free memory that logits of a step may take
COSTS = KeptResults("step-costs.json")


class KeptCosts:
    """The costs of the steps of a target and a search that an earlier start has measured, kept on disk."""

    def __init__(self, memory: PagedMemory, search: SearchProposer):
        """Refer to the costs of steps on a paged cache with the deepest search that they may make."""
        target, self._memory, self._search = memory.target, memory, search
        device = [target.device.type]
        if target.device.type == "cuda":
            from triton import __version__ as triton_version

            device = [torch.cuda.get_device_name(target.device), triton_version]
        self._digest = COSTS.digest(
            [
                [*_shapes(target.model), *_shapes(search.drafter)],
                [type(search).__name__, type(search.drafter).__name__, *search.sizes.items(), search.compiled],
                [target.model.config.to_json_string(), sorted(x.words for x in target.features), target.ranks.size],
                [str(pool.dtype) for pool in memory.store.pools],
                [*device, torch.__version__, __version__, TOKENS, ROWS],
            ]
        )

    def find_or_measure(self) -> StepCosts:
        """Return the costs that are kept, else measure and keep them. Every rank calls it."""
        ranks = self._memory.target.ranks
        costs = ranks.from_first(_read_costs(COSTS.read_all().get(self._digest)))
        if costs is not None:
            _LOG.info("an earlier start has measured the costs of steps")
            return costs
        costs = measure_step_costs(self._memory, self._search)
        if ranks.rank == 0:
            COSTS.write(self._digest, asdict(costs))
        return costs

    def forget(self) -> None:
        """Let the next start measure the costs again."""
        if self._memory.target.ranks.rank == 0:
            COSTS.write(self._digest, None)


def _shapes(module: nn.Module) -> Iterator[list[object]]:
    for name, x in module.state_dict().items():
        yield [name, [*x.shape], str(x.dtype)]


def _read_costs(kept: object) -> StepCosts | None:
    """Return costs from their stored form; None where it is missing or damaged."""
    try:
        costs = StepCosts(**kept)  # type: ignore[arg-type]
        numbers = [x for curve in (costs.forward, costs.level) for point in curve for x in point] + [costs.reading]
        return costs if costs.forward and costs.level and all(map(isfinite, numbers)) and min(numbers) >= 0 else None
    except (TypeError, ValueError):
        return None


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
        forward = tuple((rows, _seconds(memory, UNDRAFTED, rows)) for rows in TOKENS if rows <= most)
        searched = tuple((rows, _seconds(memory, few, rows)) for rows in ROWS if rows * nodes <= max(most, nodes))
    # Many rows without drafts may take longer than the same tokens of fewer rows, which says nothing of levels.
    levels = ((rows, seconds - time_at(forward, rows * nodes)) for rows, seconds in searched)
    level = tuple((rows * search.beams, left / search.depth) for rows, left in levels if left > 0) or ((1, 0.0),)
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
