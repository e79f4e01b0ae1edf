"""Whole calls of many rows by a clock that counts what each step takes: drafts never lose much, whoever drafts."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from redrafter.drafting.estimates import QUALITIES, SHARING_ROWS, StepCosts, best_trees
from redrafter.drafting.loss_budget import AcceptanceHistory
from redrafter.drafting.policy import CostPolicy, DraftedStep, StepRows
from redrafter.drafting.proposer import PlainProposer, Proposer, SearchProposer, step_tokens
from redrafter.drafting.step_times import OUTDATED, StepTimes
from redrafter.scheduler.captured_step import bucket
from redrafter.tree.likelihood import LIKELIHOODS

PLAIN, WHOLE = PlainProposer(), SearchProposer(None, None, 5, 5, 26)  # nothing drafts here
NEW_TOKENS = 128
# Milliseconds of greedy steps as they are measured at the start, on an H200 at an 8B's cost.
STEPS = ((1, 6.2), (8, 6.5), (32, 7.3), (64, 8.2), (128, 10.7), (256, 14.0), (512, 21.0), (1024, 37.0), (2048, 70.0))
COSTS = StepCosts(STEPS, STEPS, ((1, 0.35), (64, 0.5), (256, 0.9)), ((5, 0.15), (320, 0.25), (1280, 0.5)))
NOISE = 0.003  # milliseconds that the noise of a token takes, of which no greedy step has any
DRAFTERS = {
    "good": (0.8, 1.0),
    "fair": (0.7, 1.0),
    "poor": (0.45, 1.0),
    "overconfident": (0.7, 0.6),
    "random": (0.3, 0),
}


def drafts(proposer: SearchProposer, rows: int, quality: float, trust: float, dice: torch.Generator):
    """Return how many drafts of each row are accepted, and what became of drafts as `count_outcomes` counts it.

    The best draft of a level is right with its likelihood, which is `quality` on average, times `trust`.
    """
    shape = rows, proposer.depth
    best = torch.rand(shape, generator=dice) ** ((1 - quality) / quality)
    path = best.cumprod(1)
    count = step_tokens(proposer, bucket(rows)) - bucket(rows)
    verified = path >= path.flatten().sort(descending=True).values[min(count, path.numel()) - 1]
    right = (torch.rand(shape, generator=dice) < trust * best) & verified
    accepted = right.long().cumprod(1)

    def counted(chosen: Tensor) -> list[int]:
        return [int((chosen >= bound).sum()) for bound in LIKELIHOODS]

    levels = [counted(level) for level in path.unbind(1)]
    return accepted.sum(1), [counted(path[verified]), counted(path[accepted.bool()]), *levels]


class Engine:
    """Takes calls that sample; the costs of its steps are `true`, and what its policy learns is kept."""

    def __init__(self, costs: StepCosts, true: Callable[[Proposer, int], float], *, corrected_every: int = 1):
        self.true, self.histories = true, {sampled: AcceptanceHistory() for sampled in (False, True)}
        self.times = StepTimes(costs, PLAIN, corrected_every=corrected_every)
        self.candidates = {size: self._candidates(costs, size) for size in {bucket(n) for n in range(1, 513)}}

    @staticmethod
    def _candidates(costs: StepCosts, size: int) -> list[SearchProposer]:
        shapes = best_trees(costs, WHOLE, size, size >= SHARING_ROWS, QUALITIES["cuda"])
        return [SearchProposer(None, None, s.beams, s.depth, s.nodes, s.shared_nodes) for s in shapes]

    def call(self, rows: int, drafter: str, seed: int) -> tuple[float, list[bool]]:
        """Return the speed of a call relative to one without drafts, and which of its steps drafted."""
        policy, dice = CostPolicy(self.times, self.candidates, self.histories), torch.Generator().manual_seed(seed)
        left, time, drafted = torch.full((rows,), NEW_TOKENS), 0.0, list[bool]()
        while len(left):
            size = bucket(len(left))
            proposer = policy.choose(StepRows(size, len(left), len(left), sampled=True))
            seconds = self.true(proposer, size)
            if self.times.due(size, proposer, sampled=True):
                self.times.correct(size, proposer, seconds, sampled=True)
            drafted.append(proposer.depth > 0)
            accepted, time = torch.zeros_like(left), time + seconds
            if proposer.depth:
                accepted, outcomes = drafts(proposer, len(left), *DRAFTERS[drafter], dice)
                policy.record(DraftedStep(size, len(left), proposer, accepted.tolist(), 0, outcomes, proposer.depth))
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
    twice = StepCosts(STEPS, tuple((n, 2.5 * t) for n, t in STEPS), COSTS.searches, COSTS.levels)
    half = StepCosts(tuple((n, 2.5 * t) for n, t in STEPS), STEPS, ((1, 0.0),), ((1, 0.0),))
    for costs in (twice, half):  # drafts seem dear, and free
        engine = Engine(costs, COSTS.time_of)
        if costs is twice:
            engine.candidates = Engine(COSTS, COSTS.time_of).candidates  # as an engine has the assumed ones then
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


def test_undrafted_steps_are_timed_first_and_again_once_their_time_is_outdated():
    times = StepTimes(COSTS, PLAIN, corrected_every=1)
    assert times.lacks_plain(8, sampled=False)
    for _ in range(2):
        times.correct(8, PLAIN, 1.0)
    assert not times.lacks_plain(8, sampled=False)
    assert times.lacks_plain(8, sampled=True)
    for _ in range(OUTDATED):
        times.correct(8, WHOLE, 1.0)
    assert times.lacks_plain(8, sampled=False)
    assert not StepTimes(COSTS, PLAIN).lacks_plain(8, sampled=False)
