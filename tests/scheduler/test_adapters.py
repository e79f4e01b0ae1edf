"""Sequences with LoRA adapters side by side, in steps and prompts of every kind, write what each writes alone."""

import random

import pytest

from helpers.adapters import adapted, saved
from helpers.models import VOCAB, paged, tiny_drafter, tiny_model, with_tree
from helpers.scheduling import (
    Sink,
    alone,
    launch_ahead,
    make_sequence,
    nothing_is_held,
    random_sequences,
    run,
    scheduler,
    seeing_sequence,
)
from helpers.seeing_models import tiny_seeing_model
from redrafter.engine.engine import Engine
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.sequence import TokenSequence

GREEDY = SamplingParams(temperature=0)
NAMES = (None, "one", "two")


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Engine:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    engine, folder = with_tree(model, tiny_drafter(), 4, 4), tmp_path_factory.mktemp("adapters")
    engine.load_adapter("one", saved(folder / "one")[1])
    engine.load_adapter("two", saved(folder / "two", seed=2, target_modules=["o_proj", "down_proj"])[1])
    return engine


def with_adapters(engine: Engine, sequences: list[TokenSequence], seed: int = 0) -> list[TokenSequence]:
    """Give sequences adapters, or none."""
    made = random.Random(seed)
    for sequence in sequences:
        name = made.choice(NAMES)
        sequence.adapter = None if name is None else engine.target.adapters.hold(name)
    return sequences


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("apart", [0, 1, 3])
@pytest.mark.parametrize("limits", [{}, {"max_batch_size": 3}, {"max_num_tokens": 60}, {"chunked": False}], ids=str)
def test_sequences_with_all_adapters_write_what_each_does_alone(apart, limits, ahead, engine, monkeypatch):
    sequences = with_adapters(engine, random_sequences(16, seed=apart), apart)
    with monkeypatch.context() as patch:
        if ahead:
            launch_ahead(patch)
        served = scheduler(engine, **limits)
    run(served, sequences, apart)
    for sequence in sequences:
        assert sequence.sink.tokens == alone(engine, sequence)
    nothing_is_held(served)


def test_a_preempted_sequence_goes_on_with_its_adapter(engine):
    sequences = [make_sequence([5 + row, 6, 7], 60, GREEDY) for row in range(6)]
    with_adapters(engine, sequences, seed=3)
    served = scheduler(engine, blocks=22)
    run(served, sequences)
    assert served.preempted
    for sequence in sequences:
        assert sequence.sink.tokens == alone(engine, sequence)


def test_equal_prompts_share_blocks_where_they_have_one_adapter(engine):
    prompt = [random.Random(1).randrange(3, VOCAB) for _ in range(50)]
    served = scheduler(engine)
    for names, reused in ((NAMES, False), (NAMES, True)):
        for name in names:
            adapter = None if name is None else engine.target.adapters.hold(name)
            sequence = TokenSequence(prompt, 8, GREEDY, Sink(), adapter=adapter)
            run(served, [sequence])
            assert (sequence.reused > 0) == reused
            assert sequence.sink.tokens == alone(engine, sequence)


def test_a_salt_still_parts_sequences_with_one_adapter(engine):
    prompt, served = [random.Random(2).randrange(3, VOCAB) for _ in range(50)], scheduler(engine)
    for salt, reused in (("a", False), ("b", False), (None, False), ("a", True)):
        adapter = engine.target.adapters.hold("one")
        sequence = TokenSequence(prompt, 8, GREEDY, Sink(), adapter=adapter, cache_salt=salt)
        run(served, [sequence])
        assert (sequence.reused > 0) == reused


def test_steps_without_adapters_are_other_steps(engine):
    served = scheduler(engine)
    sequences = [make_sequence([5, 6, 7], 12, GREEDY) for _ in range(2)]
    run(served, sequences[:1])
    assert [key[-1] for key in served.batch.captured_steps] == [0]
    sequences[1].adapter = engine.target.adapters.hold("one")
    run(served, sequences[1:])
    assert {key[-1] for key in served.batch.captured_steps} == {0, engine.target.adapters.stacks.version}


def test_a_preempted_sequence_with_images_is_read_again_with_its_adapter(tmp_path):
    model, layers = tiny_seeing_model("qwen2_5_vl"), r".*language_model.*\.(q_proj|v_proj|down_proj)"
    model.generation_config.eos_token_id = None
    engine = paged(with_tree(model, tiny_drafter(), 4, 3))
    adapted(model=tiny_seeing_model("qwen2_5_vl"), target_modules=layers).save_pretrained(tmp_path)
    engine.load_adapter("one", tmp_path)
    sequences = [seeing_sequence(engine, (3 + row, "image", 4), row, GREEDY, count=50) for row in range(6)]
    for sequence in sequences[:4]:
        sequence.adapter = engine.target.adapters.hold("one")
    served = scheduler(engine, blocks=14)
    run(served, sequences)
    assert served.preempted
    for sequence in sequences:
        assert sequence.sink.tokens == alone(engine, sequence)
    nothing_is_held(served)
