"""Log-probabilities of prompts: the model's own, however the prompts were read and whatever was served beside them."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from helpers.features import make_engine
from helpers.models import VOCAB, tiny_drafter, tiny_model, with_tree
from helpers.scheduling import (
    KINDS,
    alone,
    make_sequence,
    nothing_is_held,
    random_sequences,
    run,
    run_as_alone,
    same_alone,
    scheduler,
)
from redrafter import Engine
from redrafter.scheduler.logprobs import score_prompt
from redrafter.scheduler.sequence import TokenSequence

GREEDY = KINDS["greedy"]


def scored_sequence(length: int, max_new_tokens: int = 0, count: int = 3, seed: int = 0) -> TokenSequence:
    made = random.Random(seed)
    return make_sequence(
        [made.randrange(3, VOCAB) for _ in range(length)], max_new_tokens, replace(GREEDY, prompt_logprobs=count)
    )


def check(engine: Engine, *scored: TokenSequence, atol: float = 1e-4) -> None:
    """Compare the scores of sequences with one forward of the model as transformers has it."""
    for found in scored:
        with torch.no_grad():
            lines = engine.model(torch.tensor([list(found.request.prompt)])).logits[0].float().log_softmax(-1)
        assert len(found.prompt_scores) == len(found.request.prompt) - 1
        for own, token, line in zip(found.prompt_scores, found.request.prompt[1:], lines, strict=False):
            assert own.logprob == pytest.approx(float(line[token]), abs=atol)
            expected = line.topk(found.request.params.prompt_logprobs)
            assert list(own.likeliest) == expected.indices.tolist()
            assert list(own.likeliest.values()) == pytest.approx(expected.values.tolist(), abs=atol)


@contextmanager
def head_inputs(engine: Engine) -> Iterator[list[int]]:
    """How many tokens each call of the head reads."""
    seen: list[int] = []
    hook = engine.model.lm_head.register_forward_hook(lambda *args: seen.append(args[2].shape[1]))
    yield seen
    hook.remove()


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "gpt_oss"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_prompts_scores_are_the_models_own(architecture, masked, monkeypatch):
    """masked: read as on a GPU."""
    model = tiny_model(architecture)
    model.generation_config.eos_token_id = None
    engine = with_tree(model, tiny_drafter(), 3, 4)
    if masked:
        monkeypatch.setattr(engine.target.prompt_reader, "reads_without_masks", lambda cache: False)
    mine = [scored_sequence(length, seed=length) for length in (1, 2, 17, 40)]
    run(scheduler(engine), mine)
    check(engine, *mine)
    assert all(each.sink.tokens == [] and each.sink.deltas[-1].finish == "length" for each in mine)


@pytest.mark.parametrize("limits", [{"max_num_tokens": 16}, {"max_num_tokens": 50}, {"chunked": False}], ids=str)
@pytest.mark.parametrize("apart", [0, 2])
def test_chunks_and_neighbours_change_nothing(limits, apart, engine):
    lengths = ((40, 0), (33, 9), (2, 5), (60, 0), (25, 1))
    scored = [scored_sequence(length, new, seed=length) for length, new in lengths]
    mixed = [each for pair in zip(scored, random_sequences(5, seed=3), strict=True) for each in pair]
    served = scheduler(engine, **limits)
    run(served, mixed, apart)
    check(engine, *scored)
    for each in mixed:
        assert each.sink.tokens == (alone(engine, each) if each.request.max_new_tokens else [])
    nothing_is_held(served)


def test_forwards_are_cut_where_their_logits_would_be_too_many(engine, monkeypatch):
    served = scheduler(engine)
    monkeypatch.setattr("redrafter.model.prompt_reader.MAX_SHOWN_LOGITS", 7 * VOCAB)
    monkeypatch.setattr("redrafter.scheduler.logprobs.MAX_LOGITS_AT_ONCE", 3 * VOCAB)
    mine = [scored_sequence(40), scored_sequence(31, seed=2)]
    with head_inputs(engine) as seen:
        run(served, mine)
    assert sum(seen) == 71
    assert max(seen) <= 7
    check(engine, *mine)


def test_a_prompt_that_was_read_is_read_again_to_be_scored_and_found_by_others(engine):
    scored, served = scored_sequence(40, max_new_tokens=4), scheduler(engine)
    sequences = [
        make_sequence(scored.request.prompt, 4, GREEDY),
        scored,
        make_sequence(scored.request.prompt, 4, GREEDY),
    ]
    for each in sequences:
        run_as_alone(served, [each])
    check(engine, scored)
    assert [each.reused for each in sequences] == [0, 0, 32]


def test_what_is_put_back_is_scored_once_and_whole(engine):
    scored = [scored_sequence(20 + seed, max_new_tokens=40, seed=seed) for seed in range(6)]
    served = scheduler(engine, blocks=16, max_num_tokens=24)
    run(served, [*scored, *random_sequences(6, longest=30, max_new_tokens=50)])
    assert served.running_set.preempted > 3
    check(engine, *scored)
    same_alone(engine, scored)
    nothing_is_held(served)


def test_a_draft_models_server_scores_by_the_target():
    engine = make_engine("draft model")
    mine = [scored_sequence(30, max_new_tokens=6), *random_sequences(3)]
    run_as_alone(scheduler(engine, blocks=40, max_num_tokens=40), mine)
    check(engine, mine[0])


def test_nobody_else_pays_for_it(engine):
    """The head is computed at every token of the prompt that is scored, and at one of the other."""
    served = scheduler(engine)
    served.mixed_prefill = False
    with head_inputs(engine) as seen:
        run(served, [scored_sequence(30), make_sequence([7] * 50, 1, GREEDY)])
    assert sorted(seen) == [1, 30]


def test_minus_infinity_is_a_number_among_the_scores():
    logits = torch.tensor([[0.0, 2.0, 1.0, -torch.inf]])
    [first] = score_prompt(logits, [3], 4)
    assert (first.logprob, list(first.likeliest)) == (-9999.0, [1, 2, 0, 3])
    assert first.likeliest[3] == -9999.0
    [none] = score_prompt(logits, [2], 0)
    assert none.likeliest == {}
