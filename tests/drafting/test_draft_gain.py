"""When drafting pauses, and when it is tried again."""

import pytest
import torch

from helpers.generation import noted
from helpers.models import tiny_drafter, uneven_batch, with_tree
from redrafter.drafting import step_costs
from redrafter.drafting.draft_length import FEWEST, FIRST_PAUSE, LONGEST_PAUSE, WINDOW, DraftGain
from redrafter.drafting.proposer import PlainProposer
from redrafter.engine.redrafter import ReDrafter
from redrafter.scheduler.running_batch import RunningBatch


def steps(gain: DraftGain, count: int, tokens: int, rows: int = 1) -> list[bool]:
    """Take steps in which the rows together gain `tokens` where they draft, and return which ones drafted."""
    drafted = []
    for _ in range(count):
        drafted.append(gain.should_draft())
        if drafted[-1]:
            gain.observe(rows, tokens)
    return drafted


def test_drafts_that_gain_enough_never_pause():
    assert all(steps(DraftGain(1.25), 500, tokens=5, rows=4))


def test_drafts_that_gain_nothing_pause_for_longer_and_longer():
    drafted = steps(DraftGain(1.25), 2000, tokens=1)
    assert drafted[:FEWEST] == [True] * FEWEST
    assert drafted[FEWEST : FEWEST + FIRST_PAUSE] == [False] * FIRST_PAUSE
    assert sum(drafted[-LONGEST_PAUSE - 10 :]) <= 4
    assert sum(drafted) < 0.04 * len(drafted)


def test_drafting_goes_on_where_it_gains_again():
    gain = DraftGain(1.25)
    steps(gain, 200, tokens=1)
    assert all(steps(gain, LONGEST_PAUSE + 50, tokens=3)[LONGEST_PAUSE:])


def test_one_step_of_many_rows_is_enough_to_judge_by():
    assert steps(DraftGain(1.25), 3, tokens=70, rows=64) == [True, False, False]


def test_only_the_last_steps_count():
    gain = DraftGain(1.25)
    steps(gain, 10 * WINDOW, tokens=5)
    assert not all(steps(gain, WINDOW + 2, tokens=1))


@pytest.mark.parametrize("how", [{"do_sample": False}, {"do_sample": True, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_drafter_that_guesses_badly_is_left_out_of_most_steps(llama, rows, how, monkeypatch):
    taken = noted(monkeypatch, RunningBatch, "prepare_step", lambda step, *_: isinstance(step.proposer, PlainProposer))
    monkeypatch.setattr(ReDrafter, "pauses", True)
    monkeypatch.setattr(step_costs, "ASSUMED_SEARCHES", ((1, 3.0),))  # even this drafter often guesses right
    engine = with_tree(llama, tiny_drafter(), 2, 2)
    ids, mask = uneven_batch(rows)
    settings = {"max_new_tokens": 60, "eos_token_id": None} | how
    out = engine.generate(ids, mask, **settings)
    assert 0.5 < sum(taken) / len(taken) < 1
    assert torch.equal(out, engine.generate(ids, mask, speculate=False, **settings))
