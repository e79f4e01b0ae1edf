"""Capture steps and compile kernels on a GPU: the first few before a server is ready, the others while it is idle."""

import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from redrafter.drafting.policy import DraftPolicy, StepRows
from redrafter.drafting.proposer import Proposer
from redrafter.kernels.attention_inputs import TOKENS_PER_CHUNK
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.prefill import ROOMS_ALONE, least_backlog, rooms_of
from redrafter.scheduler.request import GenerationRequest
from redrafter.scheduler.running_batch import MIN_POSITIONS
from redrafter.scheduler.scheduler import Scheduler
from redrafter.scheduler.sequence import TokenSequence

_LOG = logging.getLogger(__name__)
PROMPT_TOKENS = (1, 5, 17, 40, 100, 200, 500, 1000)  # prompt lengths that select different kernels
GREEDY, SAMPLED = SamplingParams(temperature=0), SamplingParams()
PENALISED, TOP_P = SamplingParams(presence_penalty=0.1), SamplingParams(top_p=0.9)
# Sampling kinds whose steps are not captured for every number of rows.
RARE = (replace(PENALISED, temperature=0), PENALISED, TOP_P, replace(PENALISED, top_p=0.9))
SALT = "warm-up"  # clients with another one, or none, see no hits on the prompts of a warm-up

Kind = tuple[SamplingParams, SamplingParams]
"""Sampling of the first row, and of the others."""


class OneChoice(DraftPolicy):
    """Takes the same one of another policy's choices in every step, the last one where it has fewer."""

    def __init__(self, policy: DraftPolicy, number: int):
        """Take choice `number`, from 0."""
        self._policy, self._number = policy, number

    def choices(self, size: int, *, sampled: bool = False, mixed: bool = False) -> Sequence[Proposer]:
        """Return the choices of the other policy."""
        return self._policy.choices(size, sampled=sampled, mixed=mixed)

    def choose(self, step: StepRows) -> Proposer:
        """Return the proposer of the next step."""
        choices = self.choices(step.size, sampled=step.sampled, mixed=step.prompt_tokens > 0)
        return choices[min(self._number, len(choices) - 1)]


@dataclass(frozen=True)
class WarmUpRun:
    """Decodes sequences without a client; sequences of clients that arrive meanwhile take part.

    Attributes:
        scheduler: The scheduler.
        rows: Number of sequences.
        kind: How they draw.
        length: Tokens of each prompt.
        mixed: Whether to read a prompt for each size of buffers, one after the other, in steps of the rows.
        adapted: Whether the sequences have an adapter; a step that is captured with one serves all.
        choice: Number of the policy's choice that drafts.
    """

    scheduler: Scheduler
    rows: int
    kind: Kind
    length: int = 1
    mixed: bool = False
    adapted: bool = False
    choice: int = 0

    def __call__(self) -> None:
        """Decode two tokens after each prompt, one by prefill and one by a step; with `mixed`, until all are read."""
        scheduler, batch = self.scheduler, self.scheduler.batch
        adapters, own = scheduler.engine.target.adapters, list[TokenSequence]()
        batch.reserve(scheduler.longest)  # a later growth of buffers would discard captured steps
        policy = batch.policy
        # A policy that never pauses, so that all drafted steps are captured.
        always = batch.policy = OneChoice(policy, self.choice)

        def submit(prompt: list[int], count: int, params: SamplingParams, salt: str = SALT) -> TokenSequence:
            request = GenerationRequest(prompt, count, params, cache_salt=salt, adapter=adapter)
            own.append(TokenSequence(request, lambda *_: None))
            scheduler.submit(own[-1])
            return own[-1]

        name = adapters.names[0] if self.adapted and adapters.names else None
        with adapters.holding([name]) as [adapter]:
            try:
                count = scheduler.longest - 1 if self.mixed else 2
                for row in range(self.rows):
                    submit([1 + row % 7] * self.length, count, self.kind[row > 0])
                while self.mixed and any(not each.ended and each.row is None for each in own):
                    scheduler.round()
                rooms = rooms_of(self.rows, batch.step_nodes) if self.mixed else ()
                for length in map(max, shortest_prompts(rooms), map(least_backlog, rooms)):
                    # A unique salt keeps the cache from shortening the prefill.
                    salt = f"{SALT} {self.rows} {length} {self.kind} {self.choice}"
                    read = submit([1] * min(length, longest_prompt(scheduler)), 1, self.kind[0], salt)
                    while not read.ended and batch.rows:
                        scheduler.round()
                    if scheduler.running_set.running > self.rows:  # a client waits for the end of this run
                        break
            finally:
                if self.mixed:
                    scheduler.cancel(*own)
                while not all(each.ended for each in own):
                    scheduler.round()
                scheduler.settle()
                if batch.policy is always:  # not after a change of the models
                    batch.policy = policy
                scheduler.prefiller.restart_pace()  # compilation makes these durations unrepresentative


def shortest_prompts(rooms: Sequence[int]) -> list[int]:
    """Return the length of the shortest prompt that needs each of these buffers."""
    return [1 + room * TOKENS_PER_CHUNK for room in (0, *rooms[:-1])] if rooms else []


def longest_prompt(scheduler: Scheduler) -> int:
    """Return the length of the longest prompt of a warm-up, after which two tokens are written."""
    least = min(scheduler.longest, MIN_POSITIONS[scheduler.engine.target.device.type])
    return min(least - scheduler.batch.overshoot - 3, scheduler.bounds.longest_prompt)


def all_runs(scheduler: Scheduler, usual: SamplingParams, *, adapted: bool) -> Iterator[WarmUpRun]:
    """Yield the runs of a warm-up: prompts of many lengths, and steps of every batch size, the smallest first.

    For each batch size, these take the likeliest token, sample, or draw with the model's `usual` parameters, and draft
    with each choice of the policy and not at all.
    """
    most = scheduler.limits.max_batch_size
    frequent: list[Kind] = [(GREEDY, GREEDY), (SAMPLED, SAMPLED)]
    if usual.cuts or usual.edits:
        frequent += [(usual, usual), (usual, GREEDY)]
    alone = shortest_prompts(ROOMS_ALONE) if scheduler.mixed_prefill else []
    for length in sorted({*PROMPT_TOKENS, *alone}):
        if length <= longest_prompt(scheduler):
            for rows in (1, min(2, most)):
                yield WarmUpRun(scheduler, rows, frequent[0], length, adapted=adapted)
    # A single row loads all kernels that more rows need.
    sizes = itertools.product(scheduler.batch.sizes, frequent)
    for rows, kind in [*sizes, *((1, (params, params)) for params in RARE)]:
        decoding = min(rows, most - 1)
        choices, sampled = scheduler.batch.policy.choices, not all(params.greedy for params in kind)
        mixed = len(choices(rows, sampled=sampled, mixed=True)) if decoding and scheduler.mixed_prefill else 0
        # Few rows with adapters copy, and captured steps are bounded.
        count = 1 if adapted else len(choices(rows, sampled=sampled))
        for choice, limit in [*((number, None) for number in range(count)), (0, 0)]:
            first, others = (replace(params, num_speculative_tokens=limit) for params in kind)
            yield WarmUpRun(scheduler, min(rows, most), (first, others), adapted=adapted, choice=choice)
            if choice < mixed:
                yield WarmUpRun(scheduler, decoding, (first, others), mixed=True, adapted=adapted, choice=choice)


def warm_up(scheduler: Scheduler, usual: SamplingParams) -> None:
    """Do the first part of a warm-up, and leave the rest to `Scheduler.later`. The scheduler must have no sequences.

    The first part captures steps of one row and of all rows, with and without drafts. The first rows with rare sampling
    kinds wait for their own captures even later, as do the first that reach `MIN_POSITIONS` and each power of two
    above it: capturing one step takes a tenth of a second, and capturing all kinds was half of the startup time.
    """
    began, captured = time.monotonic(), scheduler.batch.captured_steps
    runs = [*all_runs(scheduler, usual, adapted=False)]
    if scheduler.engine.target.adapters.names:
        runs += all_runs(scheduler, usual, adapted=True)
    sizes = {1, scheduler.limits.max_batch_size}
    kinds = [replace(params, num_speculative_tokens=n) for params in (GREEDY, SAMPLED, usual) for n in (None, 0)]
    steps = [run for run in runs if run.length == 1 and not (run.mixed or run.adapted or run.choice)]
    first = [run for run in steps if run.rows in sizes and run.kind[0] in kinds]
    for run in first:
        run()
    scheduler.memory.forget_prefixes()

    def end() -> None:
        _LOG.info("%d steps are captured, %.0f s after the first one", len(captured), time.monotonic() - began)

    scheduler.later.extend([*(run for run in runs if run not in first), end])
    counts = f"{len(first)} of {len(runs)} runs of the warm-up captured {len(captured)} steps"
    seconds, later = time.monotonic() - began, "others are captured while no request waits, or when first needed"
    _LOG.info("%s in %.1f s; %s", counts, seconds, later)
