"""Warm-up: compile kernels and capture steps before the first request."""

import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from redrafter.kernels.token_counts import TOKENS_PER_CHUNK
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.prefill import ROOMS
from redrafter.scheduler.running_batch import MIN_POSITIONS
from redrafter.scheduler.scheduler import Scheduler
from redrafter.scheduler.sequence import TokenSequence
from redrafter.target.lora import Adapter

__all__ = ["warm_up"]

_LOG = logging.getLogger(__name__)

PROMPT_TOKENS = (1, 5, 17, 40, 100, 200, 500, 1000)  # lengths of prompts for which kernels differ
GREEDY, SAMPLED = SamplingParams(temperature=0), SamplingParams()
PENALISED, TOP_P = SamplingParams(presence_penalty=0.1), SamplingParams(top_p=0.9)
# How the first row draws and how the others do, for every kind of step (`sampling_tensors.Kind`) without a grammar.
KINDS = (
    (GREEDY, GREEDY),
    (replace(PENALISED, temperature=0), GREEDY),
    (SAMPLED, SAMPLED),
    (PENALISED, SAMPLED),
    (TOP_P, TOP_P),
    (TOP_P, SAMPLED),
    (replace(PENALISED, top_p=0.9), TOP_P),
    (TOP_P, PENALISED),
)


def warm_up(scheduler: Scheduler, adapter: Adapter | None = None) -> None:
    """Decode sequences that nobody reads: prompts of many lengths, and steps of every number of rows.

    The first sequences that come to `MIN_POSITIONS`, and to each power of two after it, still wait for their own steps.

    Args:
        scheduler: A scheduler without sequences.
        adapter: The adapter of all of these sequences; None for the model alone.
    """
    began = time.monotonic()
    limits, scheduler.limits = scheduler.limits, replace(scheduler.limits, max_queue_size=0)
    pauses, scheduler.batch.draft_pauses = scheduler.batch.draft_pauses, None  # steps shall draft, whatever it gains
    longest = min(scheduler.longest, MIN_POSITIONS[scheduler.engine.target.device.type]) - scheduler.batch.overshoot - 2
    lengths = [length for length in PROMPT_TOKENS if length < longest]
    fillings = [1 + room * TOKENS_PER_CHUNK for room in (0, *ROOMS[:-1])]  # tokens that need each room at least
    scheduler.batch.reserve(scheduler.longest)  # larger buffers would need new steps
    for rows, kind in itertools.product(scheduler.batch.sizes, KINDS):
        for speculate in (True, False):
            params = [replace(each, speculate=speculate) for each in kind]
            _write(scheduler, min(rows, limits.max_batch_size), 1, params, adapter)
        for length in fillings if scheduler.reads_beside else ():
            _read_beside(scheduler, min(rows, limits.max_batch_size - 1), min(length, longest - 1), kind, adapter)
    for length in lengths:
        _write(scheduler, 1, length, KINDS[0], adapter)
        _write(scheduler, min(2, limits.max_batch_size), length, KINDS[0], adapter)
    _LOG.info("captured %d steps in %.1f s", len(scheduler.batch.captured_steps), time.monotonic() - began)
    scheduler.limits, scheduler.batch.draft_pauses = limits, pauses
    scheduler.graphs.forget_prefixes()
    scheduler.prefiller.restart_pace()  # so that these first durations slow no later forward


def _write(
    scheduler: Scheduler, rows: int, length: int, kind: Sequence[SamplingParams], adapter: Adapter | None
) -> None:
    """Decode two tokens after each of some prompts: one by prefill, one by a step."""
    prompts = [[1 + row % 7] * length for row in range(rows)]
    scheduler.submit(*(_unread(prompt, 2, kind[row > 0], adapter) for row, prompt in enumerate(prompts)))
    while not scheduler.idle:
        scheduler.round()


def _read_beside(
    scheduler: Scheduler, rows: int, length: int, kind: Sequence[SamplingParams], adapter: Adapter | None
) -> None:
    """Read a prompt beside so many rows that go on."""
    if not rows:
        return
    going_on = [_unread([1], scheduler.longest - 1, kind[row > 0], adapter) for row in range(rows)]
    scheduler.submit(*going_on)
    while scheduler.waiting or len(scheduler.batch.rows) < rows:
        scheduler.round()
    salt = f"{rows} {kind}"  # so that no part of the prompt is in the cache
    read = _unread([1] * length, 1, kind[0], adapter, salt)
    scheduler.submit(read)
    while not read.ended and scheduler.batch.rows:
        scheduler.round()
    scheduler.cancel_all()
    while not scheduler.idle:
        scheduler.round()


def _unread(
    prompt: list[int], count: int, params: SamplingParams, adapter: Adapter | None, salt: str | None = None
) -> TokenSequence:
    """Return a sequence of at most `count` new tokens whose deltas nobody reads."""
    return TokenSequence(prompt, count, params, lambda sequence, delta: None, cache_salt=salt, adapter=adapter)
