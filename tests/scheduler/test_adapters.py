"""Sequences with LoRA adapters side by side: whose blocks they share, and which steps are theirs."""

import pytest

from helpers.features import pair
from helpers.scheduling import Sink, run_as_alone, scheduler
from redrafter.engine.engine import Engine
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.request import GenerationRequest
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
        sequence = TokenSequence(GenerationRequest(PROMPT, 8, GREEDY, adapter=adapter, cache_salt=salt), Sink())
        run_as_alone(served, [sequence])
        assert (sequence.reused > 0) == reused
