"""Sequences with LoRA adapters side by side, in steps and prompts of every kind, write what each writes alone."""

import random

import pytest

from helpers.adapters import saved
from helpers.models import VOCAB, tiny_drafter, tiny_model, with_tree
from helpers.scheduling import (
    Sink,
    alone,
    make_sequence,
    run,
    scheduler,
)
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
