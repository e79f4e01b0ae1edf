"""Each missed draft is in the class that caused it, and the steps are those of the replay."""

import pytest
import torch

from helpers.models import VOCAB, tiny_drafter, tiny_model
from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.model.target import Target
from redrafter.train.evaluate.misses import (
    Outcome,
    Steps,
    base_probabilities,
    best_guess_share,
    bucket_drafts,
    classify,
    count_misses,
    describe_drafts,
    rank_of,
    trace_steps,
    tried_drafts,
)
from redrafter.train.evaluate.replay import Shape, replay
from redrafter.train.evaluate.texts import Texts, write_texts

# Counts of tensors


def steps_of(*rows: tuple[int, int, int, int]) -> Steps:
    """Make steps of rows of left, accepted, searched and rank; step i is at position 10 * i of text i."""
    index = torch.arange(len(rows))
    return Steps(index, 10 * index, *torch.tensor(rows).unbind(1))


@pytest.mark.parametrize(
    "left, accepted, searched, rank, outcome",
    [
        (9, 1, 1, -1, Outcome.OUTSIDE_HEAD),
        (9, 1, 1, 3, Outcome.NEAR_MISS),
        (9, 1, 1, 4, Outcome.WRONG_GUESS),
        (9, 1, 2, 0, Outcome.NODE_BUDGET),
        (9, 0, 3, 7, Outcome.NODE_BUDGET),
        (9, 3, 3, 9, Outcome.ALL_ACCEPTED),
        (3, 3, 3, -1, Outcome.ALL_ACCEPTED),
        (2, 2, 2, -1, Outcome.TEXT_ENDED),
    ],
)
def test_a_step_has_the_outcome_of_the_first_test_that_it_meets(left, accepted, searched, rank, outcome):
    assert classify(steps_of((left, accepted, searched, rank)), beams=2, depth=3).tolist() == [outcome]


def test_a_rank_counts_the_scores_above_and_knows_no_unknown_token():
    scores = torch.tensor([[0.5, 2.0, 1.0], [0.5, 2.0, 1.0], [3.0, 3.0, 1.0], [9.0, 0.0, 0.0]])
    assert rank_of(scores, torch.tensor([0, 1, 1, -1])).tolist() == [2, 0, 0, -1]


def test_misses_are_counted_by_depth_and_class_and_other_outcomes_are_not():
    outcome = torch.tensor([Outcome.WRONG_GUESS, Outcome.NODE_BUDGET, Outcome.NODE_BUDGET, Outcome.ALL_ACCEPTED, 5])
    found = count_misses(outcome, torch.tensor([0, 1, 1, 2, 1]), depth=2)
    assert found.tolist() == [[0, 0, 1, 0], [0, 0, 0, 2]]


def test_drafts_are_tried_up_to_the_first_miss_the_depth_or_the_end_of_the_text():
    step, draft = tried_drafts(steps_of((9, 0, 0, 0), (9, 2, 2, 0), (9, 3, 3, 0), (2, 2, 2, 0)), depth=3)
    assert step.tolist() == [0, 1, 1, 1, 2, 2, 2, 3, 3]
    assert draft.tolist() == [0, 0, 1, 2, 0, 1, 2, 0, 1]


def test_a_draft_is_described_by_the_token_at_its_place():
    """Two steps of the second text: one draft accepted and one missed, then one missed."""
    texts, pending, left = torch.tensor([1, 1]), torch.tensor([2, 4]), torch.tensor([3, 1])
    steps = Steps(texts, pending, left, torch.tensor([1, 0]), torch.tensor([1, 0]), torch.tensor([0, 0]))
    probabilities = [torch.tensor([1.0, 0.9]), torch.tensor([1.0, 0.1, 0.2, 0.3, 0.4, 0.5])]
    probability, context, accepted = describe_drafts(steps, probabilities, depth=3)
    assert probability.tolist() == pytest.approx([0.3, 0.4, 0.5])
    assert context.tolist() == [3, 4, 5]
    assert accepted.tolist() == [True, False, False]


def test_buckets_count_drafts_and_accepted_ones():
    value, accepted = torch.tensor([0.4, 0.5, 0.6, 1.0]), torch.tensor([False, False, True, True])
    assert bucket_drafts(value, accepted, (0.5, 0.9)).tolist() == [[1, 0], [2, 1], [1, 1]]


# Steps of constructed drafters


def fond_drafter(monkeypatch, head: int | None = None) -> RecurrentDrafter:
    """Make a drafter that likes small ids best, whose search of 2x2 finds the drafts 0, 1, then 0 0 and 1 0.

    Args:
        monkeypatch: Pytest's fixture.
        head: Tokens that it knows, the smallest ids; None for all.
    """
    drafter = tiny_drafter(draft_vocab_size=head)
    falling = -torch.arange(head or VOCAB, dtype=torch.float)

    def step(embedding, state, hidden, read):
        logits = falling if state is None else 2 * falling
        return logits.expand(*embedding.shape[:-1], -1), embedding

    monkeypatch.setattr(drafter, "step", step)
    return drafter


@pytest.mark.parametrize(
    "continuation, nodes, head, outcome, accepted",
    [
        ([5, 50], 5, 8, Outcome.OUTSIDE_HEAD, 0),
        ([5, 0, 8], 5, 8, Outcome.OUTSIDE_HEAD, 1),
        ([5, 0, 7], 5, 8, Outcome.WRONG_GUESS, 1),
        ([5, 3], 5, None, Outcome.NEAR_MISS, 0),
        ([5, 4], 5, None, Outcome.WRONG_GUESS, 0),
        ([5, 0, 1], 5, None, Outcome.NEAR_MISS, 1),
        ([5, 1], 5, None, Outcome.TEXT_ENDED, 1),
        ([5, 1], 2, None, Outcome.NODE_BUDGET, 0),
        ([5, 1, 0], 5, None, Outcome.ALL_ACCEPTED, 2),
        ([5, 0, 0], 5, None, Outcome.ALL_ACCEPTED, 2),
        ([5, 0, 0], 2, None, Outcome.NODE_BUDGET, 1),
    ],
)
def test_each_class_of_misses_comes_from_its_cause(monkeypatch, continuation, nodes, head, outcome, accepted):
    """One step, from a prompt of one token."""
    texts = Texts([[9, *continuation]], [1], [False])
    steps = trace_steps(fond_drafter(monkeypatch, head), Target(tiny_model("llama")), texts, Shape(2, 2, nodes))
    assert classify(steps, 2, 2).tolist() == [outcome]
    assert steps.accepted.tolist() == [accepted]
    assert (steps.text.tolist(), steps.pending.tolist(), steps.left.tolist()) == ([0], [1], [len(continuation) - 1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", [Shape(3, 4, 13), Shape(3, 4, 6), Shape(1, 3, 4)])
@pytest.mark.parametrize("head", [None, 40])
def test_traced_steps_are_those_of_the_replay(head, shape, temperature):
    target, drafter = Target(tiny_model("llama")), tiny_drafter(draft_vocab_size=head)
    texts = write_texts(target, [[5], [6, 7, 8], [9, 10]], 30, temperature, seed=3, end_ids=[2, 11, 12])
    steps = trace_steps(drafter, target, texts, shape)
    for index, stats in enumerate(replay(drafter, target, texts, [shape])[0]):
        own = steps.accepted[steps.text == index]
        assert len(own) == stats.steps
        assert [int((own > depth).sum()) for depth in range(shape.depth)] == stats.accepted_by_depth
    outcome = classify(steps, shape.beams, shape.depth)
    assert ((outcome == Outcome.OUTSIDE_HEAD).any()) == (head is not None)
    if shape.nodes == shape.lattice:
        assert not (outcome == Outcome.NODE_BUDGET).any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("form", [{}, {"context_window": 9, "context_head_dim": 8}], ids=["published", "context"])
def test_a_rank_is_that_of_the_search(form, temperature):
    """The search of one beam drafts the token of rank 0 at every depth, and no other."""
    target, drafter = Target(tiny_model("llama")), tiny_drafter(**form)
    torch.manual_seed(0)
    for weight in drafter.parameters():  # so large that the recurrence matters, so small that guesses are often right
        torch.nn.init.normal_(weight, std=0.15)
    if drafter.context is not None:
        torch.nn.init.normal_(drafter.context.out.weight, std=0.5)  # or nothing that is read would show
    texts = write_texts(target, [[token] for token in range(5, 25)], 60, temperature, seed=3)
    steps = trace_steps(drafter, target, texts, Shape(1, 3, 3))
    missed = steps.accepted < steps.left.clamp(max=3)
    assert ((steps.rank == 0) == (steps.searched > steps.accepted))[missed].all()
    if temperature:
        assert (missed & (steps.rank == 0) & (steps.accepted == 2)).any()
        assert (missed & (steps.rank > 0) & (steps.accepted > 0)).any()


def test_texts_that_ended_at_once_have_no_steps():
    target, texts = Target(tiny_model("llama")), Texts([[5, 6], [7, 8, 9]], [1, 2], [True, True])
    steps = trace_steps(tiny_drafter(), target, texts, Shape(2, 2, 5))
    assert [len(found) for found in describe_drafts(steps, base_probabilities(target, texts), 2)] == [0, 0, 0]
    assert count_misses(classify(steps, 2, 2), steps.accepted, 2).tolist() == [[0] * 4] * 2


def test_best_guesses_are_counted_at_every_position_without_noise(monkeypatch):
    """Count right guesses of a drafter that always guesses 0 best, along texts that claim to be sampled."""
    texts = Texts([[9, 5, 0, 0, 7, 0], [9, 5, 5, 0]], [1, 2], [False, False], temperature=1.0, seeds=[1, 2])
    target = Target(tiny_model("llama"))
    # Behind the pending tokens 5, 0, 0, 7: 0 0 7, 0 7 0, 7 0, 0. Behind the second text's 5: 0.
    assert best_guess_share(fond_drafter(monkeypatch), target, texts, 4) == [4 / 5, 2 / 3, 1 / 2, 1]
    assert best_guess_share(fond_drafter(monkeypatch), target, texts, 5)[4] is None


def test_best_guesses_see_no_noise(monkeypatch):
    texts = Texts([[9] + [0] * 40], [1], [False], temperature=1.0, seeds=[1])
    assert best_guess_share(fond_drafter(monkeypatch), Target(tiny_model("llama")), texts, 2) == [1, 1]


@pytest.mark.parametrize("temperature, divisor", [(0.0, 1.0), (1.0, 1.0), (0.5, 0.5)])
def test_the_base_s_probabilities_are_those_of_its_logits(temperature, divisor):
    model = tiny_model("llama")
    texts = Texts([[5, 6, 7, 8], [9, 10]], [1, 1], [False, False], temperature)
    for ids, found in zip(texts.tokens, base_probabilities(Target(model), texts), strict=True):
        logits = model(torch.tensor([ids])).logits[0, :-1] / divisor
        expected = logits.softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
        torch.testing.assert_close(found, torch.cat([torch.ones(1), expected]), atol=1e-5, rtol=1e-4)
