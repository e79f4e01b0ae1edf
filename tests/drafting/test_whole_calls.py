"""Whole calls of many rows by a clock that counts what each step takes: drafts never lose much, whoever drafts."""

from collections.abc import Callable

import pytest
import torch

from redrafter.drafting.policy import AcceptanceHistory, CostPolicy, DraftedStep, StepRows
from redrafter.drafting.proposer import Proposer, SearchProposer, UndraftedProposer, step_tokens
from redrafter.drafting.step_times import OUTDATED, StepCosts, StepTimes
from redrafter.drafting.tree_choice import SHARING_ROWS, best_tree
from redrafter.scheduler.captured_step import bucket

PLAIN, WHOLE = UndraftedProposer(), SearchProposer(None, None, 5, 5, 26)  # nothing drafts here
NEW_TOKENS = 128
# Milliseconds of greedy steps as they are measured at the start, on an H200 at an 8B's cost.
STEPS = ((1, 6.2), (8, 6.5), (32, 7.3), (64, 8.2), (128, 10.7), (256, 14.0), (512, 21.0), (1024, 37.0), (2048, 70.0))
COSTS = StepCosts(STEPS, ((1, 0.2), (320, 0.3), (1280, 0.6)))
NOISE = 0.003  # milliseconds that the noise of a token takes, of which no greedy step has any
DRAFTERS = {
    "good": (0.8, 1.0),
    "fair": (0.7, 1.0),
    "poor": (0.45, 1.0),
    "overconfident": (0.7, 0.6),
    "random": (0.3, 0),
}


def drafts(proposer: SearchProposer, rows: int, quality: float, trust: float, dice: torch.Generator):
    """Return how many drafts of each row are accepted.

    The best draft of a level is right with its likelihood, which is `quality` on average, times `trust`.
    """
    shape = rows, proposer.depth
    best = torch.rand(shape, generator=dice) ** ((1 - quality) / quality)
    path = best.cumprod(1)
    count = step_tokens(proposer, bucket(rows)) - bucket(rows)
    verified = path >= path.flatten().sort(descending=True).values[min(count, path.numel()) - 1]
    right = (torch.rand(shape, generator=dice) < trust * best) & verified
    return right.long().cumprod(1).sum(1)


class Engine:
    """Takes calls that sample; the costs of its steps are `true`, and what its policy learns is kept."""

    def __init__(self, costs: StepCosts, true: Callable[[Proposer, int], float], *, corrected_every: int = 1):
        self.true, self.histories = true, {sampled: AcceptanceHistory() for sampled in (False, True)}
        self.times = StepTimes(costs, PLAIN, corrected_every=corrected_every)
        self.candidates = {size: self._candidates(costs, size) for size in {bucket(n) for n in range(1, 513)}}

    @staticmethod
    def _candidates(costs: StepCosts, size: int) -> list[SearchProposer]:
        shape = best_tree(costs, WHOLE, size, share=size >= SHARING_ROWS)
        return [SearchProposer(None, None, shape.beams, shape.depth, shape.nodes, shape.shared_nodes)]

    def call(self, rows: int, drafter: str, seed: int) -> tuple[float, list[bool]]:
        """Return the speed of a call relative to one without drafts, and which of its steps drafted."""
        policy, dice = CostPolicy(self.times, self.candidates, self.histories), torch.Generator().manual_seed(seed)
        left, time, drafted = torch.full((rows,), NEW_TOKENS), 0.0, list[bool]()
        while len(left):
            size = bucket(len(left))
            chosen = StepRows(size, len(left), len(left), sampled=True)
            proposer = policy.choose(chosen)
            seconds = self.true(proposer, size)
            if self.times.due(size, proposer, sampled=True):
                self.times.correct(size, proposer, seconds, sampled=True)
            drafted.append(proposer.depth > 0)
            accepted, time = torch.zeros_like(left), time + seconds
            if proposer.depth:
                accepted = drafts(proposer, len(left), *DRAFTERS[drafter], dice)
                levels = [proposer.depth] * len(left)
                policy.record(DraftedStep(chosen, proposer, accepted.tolist(), levels))
            left = left - 1 - accepted
            left = left[left > 0]
        return NEW_TOKENS * self.true(PLAIN, bucket(rows)) / time, drafted


def sampling(proposer: Proposer, rows: int) -> float:
    """Return the time of a step that samples: each level of drafts has its noise."""
    return COSTS.time_of(proposer, rows) + NOISE * rows * (proposer.depth + 1)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("rows", [128, 256, 512])
def test_no_call_of_many_rows_that_sample_is_slower_than_without_drafts(rows, drafter):
    engine = Engine(COSTS, sampling)
    speeds = [engine.call(rows, drafter, seed)[0] for seed in range(4)]
    assert min(speeds) > 0.98, speeds
    if drafter == "good" and rows == 128:
        assert speeds[-1] > 1.1


@pytest.mark.parametrize("drafter", ["good", "random"])
def test_costs_that_were_measured_under_another_load_mislead_no_engine_for_long(drafter):
    for costs in (StepCosts(STEPS, ((1, 3.0),)), StepCosts(STEPS, ((1, 0.0),))):  # drafts seem dear, and free
        engine = Engine(costs, COSTS.time_of)
        speeds = [engine.call(64, drafter, seed)[0] for seed in range(3)]
        assert min(speeds) > 0.96, speeds
        if drafter == "good":
            assert speeds[-1] > 1.1, speeds


def test_a_cost_that_changes_later_is_followed():
    kind, times = WHOLE, StepTimes(COSTS, PLAIN, corrected_every=1)
    for _ in range(10):
        times.correct(8, PLAIN, COSTS.time_of(PLAIN, 8))
        times.correct(8, kind, COSTS.time_of(kind, 8))
    before = times.time_of(kind, 8) / times.time_of(PLAIN, 8)
    assert before == pytest.approx(COSTS.time_of(kind, 8) / COSTS.time_of(PLAIN, 8))
    times.correct(8, kind, 50 * COSTS.time_of(kind, 8))
    assert times.time_of(kind, 8) / times.time_of(PLAIN, 8) < 1.1 * before, "one step may have been stretched"
    for _ in range(60):
        times.correct(8, kind, 2 * COSTS.time_of(kind, 8))
    assert times.time_of(kind, 8) / times.time_of(PLAIN, 8) == pytest.approx(2 * before, rel=0.02)


def test_slow_first_steps_are_timed_again_soon():
    times, real = StepTimes(COSTS, PLAIN, corrected_every=1), COSTS.time_of(WHOLE, 8) / COSTS.time_of(PLAIN, 8)
    for step in range(100):
        if times.lacks(8, PLAIN, sampled=False):
            times.correct(8, PLAIN, (2 if step < 2 else 1) * COSTS.time_of(PLAIN, 8))
        else:
            times.correct(8, WHOLE, COSTS.time_of(WHOLE, 8))
    assert times.time_of(WHOLE, 8) / times.time_of(PLAIN, 8) == pytest.approx(real)


def test_undrafted_steps_are_timed_first_and_again_once_their_time_is_outdated():
    times = StepTimes(COSTS, PLAIN, corrected_every=1)
    assert times.lacks(8, PLAIN, sampled=False)
    for _ in range(2):
        times.correct(8, PLAIN, 1.0)
    assert not times.lacks(8, PLAIN, sampled=False)
    assert times.lacks(8, PLAIN, sampled=True)
    for _ in range(OUTDATED):
        times.correct(8, WHOLE, 1.0)
    assert times.lacks(8, PLAIN, sampled=False)
    assert not StepTimes(COSTS, PLAIN).lacks(8, PLAIN, sampled=False)
