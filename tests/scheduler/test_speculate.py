"""Rows without drafts beside rows with them, drafts that rejection sampling accepts, and pauses of drafting."""

from dataclasses import replace

import pytest
import torch

from helpers.generation import noted
from helpers.models import VOCAB, tiny_drafter, tiny_model, with_tree
from helpers.scheduling import (
    KINDS,
    alone,
    change,
    make_sequence,
    random_sequences,
    rejection_sampled,
    run,
    run_as_alone,
    scheduler,
    without_drafts,
)
from redrafter import DraftTarget
from redrafter.drafting.policy import DraftedStep
from redrafter.engine.options import EngineOptions
from redrafter.model.target import Target
from redrafter.scheduler.running_batch import RunningBatch
from redrafter.scheduler.scheduler import Scheduler

NO_COPIES = EngineOptions(draft_from_text=False)


@pytest.fixture(scope="module")
def models() -> tuple[Target, Target]:
    target, draft = tiny_model("llama"), tiny_model("qwen2", num_hidden_layers=1)
    target.generation_config.eos_token_id = None
    return Target(target), Target(draft)


@pytest.mark.parametrize("kind", ["drafter", "draft model"])
def test_rows_that_limit_their_drafts_differently_share_a_step_and_write_what_they_write_alone(kind, models):
    engine = DraftTarget(*models, draft_len=3)
    if kind == "drafter":
        engine = with_tree(models[0].model, tiny_drafter(), 4, 3)
    served = scheduler(engine, blocks=60, max_batch_size=6, max_num_tokens=80)
    sequences = random_sequences(12, seed=3)
    limits = [0, 1, 2, None]
    for number, each in enumerate(sequences):
        change(each, params=replace(each.request.params, num_speculative_tokens=limits[number % 4]))
    run_as_alone(served, sequences, 1)
    for number, each in enumerate(sequences):
        limit = limits[number % 4]
        if limit is not None:
            assert not any(each.stats.accepted_by_depth[limit:])
            width = 1 if kind == "draft model" else 4
            assert all(drafted <= limit * width for drafted, _ in each.stats.per_step)
        assert sum(accepted for _, accepted in each.stats.per_step) == each.stats.accepted
        assert len(each.stats.per_step) == each.stats.draft_steps


def test_a_limit_of_drafts_is_no_verdict_on_the_drafts_below_it(models):
    """A draft model equal to the target is always right, so rows with a limit must not shorten the others' drafts."""
    served = scheduler(DraftTarget(models[0], models[0], draft_len=3, options=NO_COPIES))
    recorded = noted_steps(served)
    first = make_sequence([5, 6, 7], 12, replace(KINDS["greedy"], num_speculative_tokens=1))
    run_as_alone(served, [first, make_sequence([8, 9], 12, KINDS["greedy"])])
    assert first.stats.accepted >= first.stats.drafted - 1 > 0  # the last one may be past the limit of the sequence
    assert set(recorded) == {(1, 1), (3, 3)}


def test_no_step_is_launched_where_the_one_in_flight_is_expected_to_end_all_rows(models, monkeypatch):
    """A next request would wait for a wasted step, and a call would return after it."""
    served = scheduler(DraftTarget(models[0], models[0], draft_len=3, options=NO_COPIES))
    launched = noted(monkeypatch, RunningBatch, "step", lambda _, batch, *prompts: len(batch.rows))
    run(served, [make_sequence([5, 6, 7], 1 + 5 * 4, KINDS["greedy"])])
    assert launched.count(1) == 5, "each step writes all of its drafts and one more token"


def noted_steps(served: Scheduler) -> list[tuple[int, int]]:
    """Return a list that gets the levels that each row could accept in a step, and the drafts that it accepted."""
    steps: list[tuple[int, int]] = []
    record = served.batch.policy.record

    def noted(step: DraftedStep) -> None:
        steps.extend(zip(step.levels, step.accepted, strict=True))
        record(step)

    served.batch.policy.record = noted  # type: ignore[method-assign]
    return steps


def test_rows_that_all_want_no_drafts_step_plainly(models):
    served = scheduler(DraftTarget(*models, draft_len=3))
    run_as_alone(
        served, [make_sequence([5, 6, 7], 6, replace(KINDS["sampled"], num_speculative_tokens=0)) for _ in range(2)]
    )
    assert {step.proposer for step in served.batch.captured_steps.values()} == {served.engine.undrafted}


def test_what_a_draft_model_may_not_have_read_is_not_found_again(models):
    served = scheduler(DraftTarget(*models, draft_len=3))
    first = make_sequence(list(range(3, 23)), 30, replace(KINDS["greedy"], num_speculative_tokens=0))
    run(served, [first])
    second = make_sequence([*first.tokens, 5], 4, KINDS["greedy"])
    run_as_alone(served, [second])
    assert second.reused == 16  # of the prompt alone


def test_rejection_sampling_with_a_limit_of_drafts_draws_from_the_target(models):
    """Compare the frequency of the second and the third token with those of undrafted sampling, over 2,000 rows."""
    engine = DraftTarget(*models, draft_len=3, acceptance="rejection", options=EngineOptions(max_batch_size=2000))
    ids = torch.tensor([[5, 6, 7]]).expand(2000, -1)
    how = {"max_new_tokens": 3, "do_sample": True, "temperature": 0.4, "top_k": 3}
    limited = engine.generate(ids, num_speculative_tokens=1, seed=1, return_dict_in_generate=True, **how)
    assert max(accepted for _, accepted in limited.stats.per_step) == 1
    counts = [
        torch.bincount(tokens[:, -1] * VOCAB + tokens[:, -2], minlength=VOCAB**2).double()
        for tokens in (limited.sequences, engine.generate(ids, speculate=False, seed=9000, **how))
    ]
    common = (counts[0] + counts[1]) > 30
    difference = (counts[0] - counts[1])[common]
    deviation = (counts[0] + counts[1])[common].sqrt()
    assert (difference.abs() < 4.5 * deviation).all()


def test_rejection_sampling_accepts_what_generate_does(models):
    engine = DraftTarget(*models, draft_len=3, acceptance="rejection")
    sequences = without_drafts(random_sequences(12, seed=5))
    run(scheduler(engine, max_batch_size=5, max_num_tokens=60), sequences, 1)
    for each in sequences:
        assert each.sink.tokens == rejection_sampled(engine, each)
    assert any(each.sink.tokens != alone(engine, each) for each in sequences)  # else rejection sampling decided nothing
