"""Prompts that steps read for a draft model too: its drafts are as good as after a forward over the prompts alone."""

import copy
from dataclasses import replace

import pytest
import torch

from helpers.generation import same_as_model
from helpers.models import paged, tiny_model, uneven_batch
from helpers.recurrent import recurrent_model
from helpers.scheduling import KINDS, make_sequence, rejection_sampled, run, same_alone, scheduler, until_stepping
from helpers.vocabularies import renumbered
from redrafter import DraftTarget
from redrafter.engine.options import EngineOptions
from redrafter.model.target import Target
from redrafter.scheduler.scheduler import Scheduler
from redrafter.scheduler.sequence import TokenSequence

SHAPES = {
    "chain": {},
    "tree": {"num_beams": 3},
    "adaptive": {"adaptive": True},
    "adaptive tree": {"num_beams": 3, "adaptive": True},
    "rejection": {"acceptance": "rejection"},
}
NO_COPIES = EngineOptions(draft_from_text=False)
DRAFT_LEN = 4
FULL_STEPS = 1 + 4 * (1 + DRAFT_LEN)  # tokens of sequences whose steps keep all drafts


@pytest.fixture(scope="module")
def model():
    made = tiny_model("llama", max_position_embeddings=1024)
    made.generation_config.eos_token_id = None
    return made


def reading_in_steps(engine, **limits) -> Scheduler:
    """Return a scheduler whose sequences fail where prompts have a forward of their own."""
    served = scheduler(engine, max_batch_size=4, **limits)
    served.prefiller.forward = None
    return served


def blurred(model):
    """Return a copy that often draws what the model draws."""
    copied, generator = copy.deepcopy(model), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in copied.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    return copied


def prompt(length: int, first: int) -> list[int]:
    return [(first + 7 * index) % 90 + 1 for index in range(length)]


def join(served: Scheduler, rows: int, lengths: list[int], params) -> tuple[list[TokenSequence], list[TokenSequence]]:
    """Let rows run, if any, then let prompts of these lengths join them; return both when all have ended."""
    running = [make_sequence(prompt(5 + row, row), 61, params) for row in range(rows)]
    if running:
        until_stepping(served, *running)
    late = [make_sequence(prompt(length, 11 * length), FULL_STEPS, params) for length in lengths]
    run(served, late, 2 if rows else 0)
    return running, late


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("limits", [{}, {"max_num_tokens": 40}], ids=str)
def test_prompts_that_steps_read_change_no_token(model, shape, limits, kind):
    engine = DraftTarget(Target(model), Target(blurred(model)), **SHAPES[shape])
    running, late = join(reading_in_steps(engine, **limits), 2, [1, 30, 90, 2], KINDS[kind])
    if shape == "rejection":
        assert all(each.sink.tokens == rejection_sampled(engine, each) for each in (*running, *late))
    else:
        same_alone(engine, [*running, *late])
    assert any(each.stats.accepted for each in late)


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("acceptance", ["match", "rejection"])
@pytest.mark.parametrize(
    ("rows", "lengths", "limits"),
    [(2, [1, 9, 70], {}), (2, [300], {}), (2, [60], {"max_num_tokens": 20}), (0, [33, 50], {}), (0, [500], {})],
    ids=str,
)
def test_all_drafts_after_prompts_that_steps_read_are_kept_if_the_draft_model_is_the_target(
    model, acceptance, kind, rows, lengths, limits
):
    engine = DraftTarget(Target(model), Target(model), draft_len=DRAFT_LEN, acceptance=acceptance, options=NO_COPIES)
    served = reading_in_steps(engine, **limits)
    for each in [sequence for sequences in join(served, rows, lengths, KINDS[kind]) for sequence in sequences]:
        assert each.stats.per_step == [(DRAFT_LEN, DRAFT_LEN)] * each.stats.draft_steps
    # What is reused of the last prompt was read by the draft model too.
    again = make_sequence([*late_prompt(lengths), 5], FULL_STEPS, KINDS[kind])
    run(served, [again])
    assert again.reused >= lengths[-1] // 16 * 16
    assert again.stats.per_step == [(DRAFT_LEN, DRAFT_LEN)] * 4


def late_prompt(lengths: list[int]) -> list[int]:
    return prompt(lengths[-1], 11 * lengths[-1])


def test_rows_that_take_no_drafts_leave_no_prompt_unread(model):
    """The step that reads the prompt drafts nothing, since no running row takes drafts."""
    engine = DraftTarget(Target(model), Target(model), draft_len=DRAFT_LEN, options=NO_COPIES)
    served = reading_in_steps(engine)
    undrafted = make_sequence(prompt(5, 3), 60, replace(KINDS["greedy"], num_speculative_tokens=0))
    until_stepping(served, undrafted)
    late = make_sequence(prompt(50, 7), FULL_STEPS, KINDS["greedy"])
    run(served, [late])
    assert late.stats.per_step == [(DRAFT_LEN, DRAFT_LEN)] * 4
    same_alone(engine, [undrafted, late])


@pytest.mark.parametrize("vocabulary", [40, 128])
def test_a_prompt_may_have_ids_that_the_draft_model_lacks(model, vocabulary):
    draft_model = tiny_model("llama", vocab_size=vocabulary, num_hidden_layers=1)
    engine = DraftTarget(Target(model), Target(draft_model))
    running, late = join(reading_in_steps(engine), 2, [70, 9], KINDS["greedy"])
    same_alone(engine, [*running, *late])


@pytest.mark.parametrize("shape", SHAPES)
def test_generate_writes_what_the_model_writes_where_prompts_join_rows(model, shape):
    options = EngineOptions(max_batch_size=2)
    engine = paged(DraftTarget(Target(model), Target(blurred(model)), **SHAPES[shape], options=options))
    ids, mask = uneven_batch()
    same_as_model(engine, ids, mask, max_new_tokens=20, eos_token_id=None)


def test_steps_read_no_prompts_of_draft_models_with_other_tokens_or_recurrent_states(model):
    other, vocabulary = renumbered(model)
    engines = [
        DraftTarget(Target(model), Target(other), vocabulary=vocabulary),
        DraftTarget(Target(model), Target(recurrent_model("lfm2"))),
    ]
    assert not any(scheduler(engine).mixed_prefill for engine in engines)
    assert scheduler(engines[0], speculate=False).mixed_prefill
