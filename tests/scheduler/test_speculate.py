"""Rows without drafts beside rows with them, drafts that rejection sampling accepts, and pauses of drafting."""

from dataclasses import replace

import pytest

from helpers.models import tiny_drafter, tiny_model, with_tree
from helpers.scheduling import (
    KINDS,
    alone,
    make_sequence,
    random_sequences,
    rejection_sampled,
    run,
    run_as_alone,
    scheduler,
    without_drafts,
)
from redrafter import DraftTarget
from redrafter.model.target import Target


@pytest.fixture(scope="module")
def models() -> tuple[Target, Target]:
    target, draft = tiny_model("llama"), tiny_model("qwen2", num_hidden_layers=1)
    target.generation_config.eos_token_id = None
    return Target(target), Target(draft)


@pytest.mark.parametrize("kind", ["drafter", "draft model"])
def test_a_row_without_drafts_stands_beside_rows_with_them(kind, models):
    engine = DraftTarget(*models, draft_len=3)
    if kind == "drafter":
        engine = with_tree(models[0].model, tiny_drafter(), 4, 4)
    sequences = without_drafts(random_sequences(12, seed=3))
    run_as_alone(scheduler(engine, blocks=60, max_batch_size=6, max_num_tokens=80), sequences, 1)
    for each in sequences[::2]:
        assert each.stats.draft_steps == 0
        assert all(len(delta.tokens) < 2 for delta in each.sink.deltas)
    assert any(each.stats.draft_steps for each in sequences[1::2])


def test_rows_that_all_want_no_drafts_step_plainly(models):
    served = scheduler(DraftTarget(*models, draft_len=3))
    run_as_alone(served, [make_sequence([5, 6, 7], 6, replace(KINDS["sampled"], speculate=False)) for _ in range(2)])
    assert {step.proposer for step in served.batch.captured_steps.values()} == {served.engine.plain}


def test_what_a_draft_model_may_not_have_read_is_not_found_again(models):
    served = scheduler(DraftTarget(*models, draft_len=3))
    first = make_sequence(list(range(3, 23)), 30, replace(KINDS["greedy"], speculate=False))
    run(served, [first])
    second = make_sequence([*first.tokens, 5], 4, KINDS["greedy"])
    run_as_alone(served, [second])
    assert second.reused == 16  # of the prompt alone


def test_rejection_sampling_accepts_what_generate_does(models):
    engine = DraftTarget(*models, draft_len=3, acceptance="rejection")
    sequences = without_drafts(random_sequences(12, seed=5))
    run(scheduler(engine, max_batch_size=5, max_num_tokens=60), sequences, 1)
    for each in sequences:
        assert each.sink.tokens == rejection_sampled(engine, each)
    assert any(each.sink.tokens != alone(engine, each) for each in sequences)  # else rejection sampling decided nothing
