"""What only first requests pay for, paid before anybody asks."""

from dataclasses import replace

from redrafter.cache.block_manager import BlockManager
from redrafter.scheduler.prefill_budget import PrefillPace
from redrafter.scheduler.running_batch import MIN_POSITIONS
from redrafter.scheduler.scheduler import Scheduler
from redrafter.scheduler.sequence import SamplingParams, TokenSequence

__all__ = ["warm_up"]

LENGTHS = (1, 5, 17, 40, 100, 200, 500, 1000)  # tokens of prompts, for which kernels differ
PLAIN, CUT = SamplingParams(temperature=0), SamplingParams(top_p=0.9)  # the two kinds of steps


def warm_up(scheduler: Scheduler) -> None:
    """Write texts that nobody reads: prompts of all kinds of lengths, and steps of every number of rows. A text that is
    longer than those steps have room for still waits for its own. For when nobody is served."""
    limits, scheduler.limits = scheduler.limits, replace(scheduler.limits, max_queue_size=0)
    longest = min(scheduler.longest, MIN_POSITIONS[scheduler.engine.target.device.type]) - scheduler.batch.overshoot - 2
    lengths = [length for length in LENGTHS if length < longest]
    for rows in scheduler.batch.sizes:
        for params in (PLAIN, CUT):
            _write(scheduler, min(rows, limits.max_batch_size), 1, params)
    for length in lengths:
        _write(scheduler, 1, length, PLAIN)
        _write(scheduler, min(2, limits.max_batch_size), length, PLAIN)
    scheduler.limits = limits
    scheduler.graphs.blocks = BlockManager(scheduler.graphs.store.num_blocks)  # none of this is to be found again
    scheduler.prefiller.pace = PrefillPace(limits.max_num_tokens)  # nor are first times to slow what follows


def _write(scheduler: Scheduler, rows: int, length: int, params: SamplingParams) -> None:
    """Texts of two tokens: one that follows the prompt, one of a step."""
    texts = [[1 + row % 7] * length for row in range(rows)]
    scheduler.submit(*(TokenSequence(text, 2, params, lambda sequence, delta: None) for text in texts))
    while not scheduler.idle:
        scheduler.round()
