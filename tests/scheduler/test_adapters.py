"""Sequences with LoRA adapters side by side: whose blocks they share, and which steps are theirs."""

import pytest

from helpers.features import pair
from helpers.scheduling import Sink, make_sequence, run, run_as_alone, scheduler
from redrafter.engine.engine import Engine
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.sequence import TokenSequence

GREEDY = SamplingParams(temperature=0)
PROMPT = [3 + 7 * n % 90 for n in range(50)]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return pair("adapters", "drafter").engine


def test_equal_prompts_share_blocks_where_they_have_one_adapter_and_one_salt(engine):
    served = scheduler(engine)
    for name, salt, reused in (
        *((name, None, reused) for reused in (False, True) for name in (None, "one", "two")),
        *(("one", "a", False), ("one", "b", False), ("one", None, True), ("one", "a", True)),
        *((None, "a", False), (None, "a", True), (None, None, True), (None, "b", False)),
    ):
        adapter = None if name is None else engine.target.adapters.hold(name)
        sequence = TokenSequence(PROMPT, 8, GREEDY, Sink(), adapter=adapter, cache_salt=salt)
        run_as_alone(served, [sequence])
        assert (sequence.reused > 0) == reused


def test_steps_without_adapters_are_other_steps(engine):
    served = scheduler(engine)
    sequences = [make_sequence([5, 6, 7], 12, GREEDY) for _ in range(2)]
    run(served, sequences[:1])
    assert {key.adapters for key in served.batch.captured_steps} == {0}
    sequences[1].adapter = engine.target.adapters.hold("one")
    run(served, sequences[1:])
    assert {key.adapters for key in served.batch.captured_steps} == {0, engine.target.adapters.stacks.version}
