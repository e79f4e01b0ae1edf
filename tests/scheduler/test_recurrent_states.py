"""Serving models with recurrent states: rows come, go, move and are preempted, and each has its own state."""

import pytest

from helpers.features import make_engine
from helpers.recurrent import recurrent_model
from helpers.scheduling import make_sequence, random_sequences, run, run_as_alone, scheduler
from redrafter import Engine
from redrafter.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module", params=["lfm2", "mamba2"])
def engine(request) -> Engine:
    return make_engine("draft model's tree", recurrent_model(request.param))


def test_no_prompts_are_read_beside_rows_and_more_sequences_than_there_are_states_wait(engine):
    sequences = random_sequences(12, seed=1, max_new_tokens=12)
    served = scheduler(engine)
    assert not served.mixed_prefill
    assert served.memory.store.rows < len(sequences)
    run_as_alone(served, sequences, 1)


def test_drafts_are_as_good_after_a_prompt_that_was_read_in_chunks(engine):
    accepted = []
    for limit in (4096, 20):
        sequence = make_sequence([5 + 7 * n % 60 for n in range(60)], 20, GREEDY)
        run(scheduler(engine, max_num_tokens=limit), [sequence])
        accepted.append(sequence.stats.accepted)
    assert accepted[0] == accepted[1]
