"""Sequences with images beside others: what each writes is what it writes alone."""

from dataclasses import replace

import pytest

from helpers.generation import noted
from helpers.models import paged, tiny_drafter, with_tree
from helpers.scheduling import (
    KINDS,
    Sink,
    alone,
    go_on,
    make_sequence,
    nothing_is_held,
    random_sequences,
    run,
    run_as_alone,
    same_alone,
    scheduler,
    seeing_sequence,
)
from helpers.seeing_models import Layout, tiny_seeing_model
from redrafter import ArgumentError, Engine
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.scheduler.sequence import TokenSequence

LONG: Layout = (40, "image", 9)
LAYOUTS: tuple[Layout, ...] = ((3, "image", 4), (2, "image", 1, "image", 3), (9, "image", 2), LONG)


@pytest.fixture(
    scope="module",
    params=["qwen2_5_vl", *(pytest.param(family, marks=pytest.mark.slow) for family in ("gemma3", "llava"))],
)
def engine(request) -> Engine:
    return engine_of(request.param)


def test_two_images_behind_the_same_ids_share_no_blocks(engine):
    first = seeing_sequence(engine, LONG, 1, KINDS["greedy"])
    other = seeing_sequence(engine, LONG, 2, KINDS["greedy"])
    second = TokenSequence(replace(first.request, images=other.request.images), Sink(other.sink.images))
    assert len(first.request.prompt) > 2 * BLOCK_SIZE
    expected = [alone(engine, sequence) for sequence in (first, second)]
    assert expected[0] != expected[1]
    served = scheduler(engine)
    for sequence in (first, second):
        run(served, [sequence])
    assert [first.sink.tokens, second.sink.tokens] == expected
    assert (first.reused, second.reused) == (0, 0)


def test_a_text_with_the_ids_of_an_image_shares_nothing_with_it(engine):
    seeing = seeing_sequence(engine, LONG, 1, KINDS["greedy"])
    text = TokenSequence(replace(seeing.request, images=None), Sink())
    served = scheduler(engine)
    run(served, [seeing])
    run(served, [text])
    assert text.reused == 0
    assert text.sink.tokens == alone(engine, text)


def test_wrong_images_end_their_own_sequence_alone(engine):
    seeing = [
        seeing_sequence(engine, LAYOUTS[seed], seed, KINDS[kind]) for seed, kind in enumerate(("greedy", "sampled"))
    ]
    sequences = [*seeing, *random_sequences(2, seed=4)]
    wrong = seeing_sequence(engine, LAYOUTS[0], 9, KINDS["greedy"])
    prompt = [token + (token == 90) for token in wrong.request.prompt]
    wrong = TokenSequence(replace(wrong.request, prompt=prompt), wrong.sink)
    served = scheduler(engine)
    for sequence in (sequences[0], wrong, *sequences[1:]):
        served.submit(sequence)
    go_on(served)
    assert wrong.sink.deltas[-1].finish == "error"
    assert isinstance(wrong.sink.deltas[-1].error, ArgumentError)
    same_alone(engine, sequences)
    nothing_is_held(served)


def engine_of(family: str) -> Engine:
    model = tiny_seeing_model(family)
    model.generation_config.eos_token_id = None
    return paged(with_tree(model, tiny_drafter(), 4, 3))


def test_rows_that_move_take_their_positions_along():
    engine = engine_of("qwen3_vl")
    seeing = seeing_sequence(engine, LAYOUTS[0], 1, KINDS["greedy"], count=3)
    text = make_sequence([5, 6, 7], 30, KINDS["greedy"])  # moves to the row of the other
    run_as_alone(scheduler(engine), [seeing, text])
    assert seeing.position_shift < 0


def test_what_a_models_config_says_of_draws_is_no_concern_of_its_images(capfd):
    engine = engine_of("qwen2_5_vl")
    draws = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "num_beams": 3, "num_return_sequences": 2}
    engine.model.generation_config.update(**draws, stop_strings=["x"], max_length=4)
    sequence = seeing_sequence(engine, LAYOUTS[0], 1, KINDS["greedy"])
    run(scheduler(engine), [sequence])
    assert len(sequence.sink.tokens) == 20
    assert not capfd.readouterr().err


def test_images_are_encoded_once_for_several_texts(monkeypatch):
    engine = engine_of("llava")
    first = seeing_sequence(engine, LAYOUTS[0], 1, KINDS["greedy"])
    calls = noted(monkeypatch, engine.model.model, "get_image_features")
    run(scheduler(engine), [first, replace(first, sink=Sink()), replace(first, sink=Sink())])
    assert len(calls) == 1
