"""Prompts that are read in the forwards of steps, beside the rows' trees."""

import pytest

from helpers.scheduling import alone, make_sequence, run, scheduler
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.prefill import Prefiller
from redrafter.scheduler.scheduler import Scheduler
from redrafter.scheduler.sequence import TokenSequence

GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.8, seed=5)


def prompt(length: int, first: int = 3) -> list[int]:
    return [(first + 7 * index) % 60 + 1 for index in range(length)]


def begin_beside(served: Scheduler, rows: int, prompts: list[list[int]], params: SamplingParams) -> list[TokenSequence]:
    """Let some rows run, then submit prompts, and return all sequences when they have ended."""
    running = [make_sequence(prompt(5 + row), 40, params) for row in range(rows)]
    served.submit(*running)
    while len(served.batch.rows) < rows:
        served.round()
    late = [make_sequence(tokens, 12, params) for tokens in prompts]
    served.submit(*late)
    run(served, [])
    return [*running, *late]


@pytest.fixture
def forwards(monkeypatch) -> list[int]:
    """The numbers of prompts of all forwards over prompts alone."""
    sizes, forward = [], Prefiller.forward

    def counted(self, chunks, caches):
        sizes.append(len(chunks))
        return forward(self, chunks, caches)

    monkeypatch.setattr(Prefiller, "forward", counted)
    return sizes


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "lengths",
    [[1], [9], [30, 2], [1, 1, 1], [64], [70]],
    ids=lambda lengths: "+".join(map(str, lengths)),
)
def test_prompts_read_beside_rows_change_no_token(engine, forwards, lengths, params):
    served = scheduler(engine)
    sequences = begin_beside(served, 3, [prompt(length, 11 * length) for length in lengths], params)
    assert sum(forwards) == 3  # those of the first rows
    for sequence in sequences:
        assert sequence.sink.tokens == alone(engine, sequence)


def test_a_prompt_beside_rows_is_read_in_chunks_within_the_limit(engine, forwards):
    served = scheduler(engine, max_num_tokens=40)
    sequences = begin_beside(served, 2, [prompt(50)], GREEDY)
    assert sum(forwards) == 2
    for sequence in sequences:
        assert sequence.sink.tokens == alone(engine, sequence)


def test_prompts_that_outnumber_the_rows_are_read_alone(engine, forwards):
    begin_beside(scheduler(engine), 1, [prompt(8), prompt(9)], GREEDY)
    assert sum(forwards) == 3


def test_a_prompt_that_is_scored_is_read_alone(engine, forwards):
    served = scheduler(engine)
    begin_beside(served, 2, [prompt(8)], SamplingParams(temperature=0, prompt_logprobs=1))
    assert sum(forwards) == 3


def test_a_long_prompt_beside_rows_lets_them_go_on(engine):
    served = scheduler(engine, max_num_tokens=30)
    running = make_sequence(prompt(5), 60, GREEDY)
    served.submit(running)
    while not running.sink.deltas:
        served.round()
    late = make_sequence(prompt(60), 2, GREEDY)
    served.submit(late)
    rounds = 0
    while not late.sink.deltas:
        before = len(running.sink.deltas)
        served.round()
        rounds += 1
        assert len(running.sink.deltas) > before or running.ended
    assert rounds > 2


def test_a_prompt_does_not_wait_for_rows_whose_trees_use_up_the_limit(engine):
    served = scheduler(engine, max_num_tokens=20)  # the trees of two rows have 34 nodes
    running = [make_sequence(prompt(5 + row), 60, GREEDY) for row in range(2)]
    served.submit(*running)
    while len(served.batch.rows) < 2:
        served.round()
    late = make_sequence(prompt(8), 2, GREEDY)
    served.submit(late)
    for _ in range(3):
        served.round()
    assert late.sink.deltas
    assert not any(each.ended for each in running)


def test_what_a_prompt_beside_rows_left_in_the_cache_is_found(engine):
    served = scheduler(engine)
    shared = prompt(48, 2)
    sequences = begin_beside(served, 2, [shared], GREEDY)
    again = make_sequence([*shared, 5], 8, GREEDY)
    run(served, [again])
    assert again.reused >= 48
    for sequence in [*sequences, again]:
        assert sequence.sink.tokens == alone(engine, sequence)
