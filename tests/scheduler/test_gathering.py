"""Prompts that arrive often wait a few steps, so that one step reads several of them."""

import random

import pytest

from helpers.generation import noted
from helpers.models import tiny_drafter, tiny_model, with_tree
from helpers.scheduling import make_sequence, same_alone, scheduler, until_stepping
from redrafter.drafting.estimates import ASSUMED_STEPS, time_at
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.gathering import MOST_STEPS, PromptGathering
from redrafter.scheduler.prefill import ROOMS, Prefiller, choose_room

CURVE = ASSUMED_STEPS["cuda"]


def simulate(rows: int, nodes: int, arrivals: float, tokens: int, *, gathers: bool) -> tuple[float, int, int]:
    """Return the time per useful step of a row, the steps that leave tokens of prompts, and the longest wait."""
    choices, gathering = random.Random(1), PromptGathering()
    waiting: list[list[int]] = []  # tokens left, and steps since its arrival, of each prompt
    time, useful, waits, longest = 0.0, 0.0, 0, 0
    for _ in range(4000):
        arrived = (choices.random() < arrivals) + (choices.random() < arrivals - 1)
        gathering.count(arrived)
        waiting += [[tokens, 0] for _ in range(arrived)]
        left = sum(each for each, _ in waiting)
        room = 16 * choose_room(len(waiting), left, ROOMS) if waiting else 0
        filled = 16 * max((each for each in ROOMS if 16 * each <= left), default=0)
        prompts = 1 if filled else len(waiting)
        if filled < room and gathers and gathering.waits(prompts, rows, nodes, room, filled):
            room, waits = filled, waits + 1
        time += time_at(CURVE, nodes + room)
        useful += rows - len(waiting)
        longest = max([longest, *(age for _, age in waiting)])
        for prompt in waiting:
            prompt[1] += 1
            read = min(prompt[0], room)
            prompt[0] -= read
            room -= read
        waiting = [prompt for prompt in waiting if prompt[0]]
    return time / useful, waits, longest


def test_a_loaded_batch_takes_less_time_where_its_prompts_wait_for_each_other():
    at_once, _, _ = simulate(64, 160, 0.9, 158, gathers=False)
    gathered, waits, longest = simulate(64, 160, 0.9, 158, gathers=True)
    assert waits > 1000
    assert longest <= 2 * MOST_STEPS
    assert gathered < 0.85 * at_once


@pytest.mark.parametrize(("rows", "nodes", "arrivals"), [(8, 208, 0.1), (1, 26, 0.01), (4, 104, 0.05), (64, 64, 0.01)])
def test_prompts_that_arrive_seldom_do_not_wait(rows, nodes, arrivals):
    assert simulate(rows, nodes, arrivals, 158, gathers=True)[1] < 100


def test_a_prompt_waits_for_few_steps_and_never_without_rows():
    gathering = PromptGathering()
    for _ in range(300):
        gathering.count(1)
    assert [gathering.waits(1, 64, 160, 64) for _ in range(MOST_STEPS + 2)] == [True] * MOST_STEPS + [False, True]
    assert not gathering.waits(1, 0, 0, 64)


def test_a_full_buffer_is_read_at_once_and_only_the_rest_of_a_prompt_waits():
    gathering = PromptGathering()
    for _ in range(300):
        gathering.count(1)
    assert all(gathering.waits(1, 64, 160, 256, 128) for _ in range(MOST_STEPS + 2))  # each reads 128 tokens
    assert gathering.waited == 0
    gathering.arrivals = 0.05
    assert not gathering.waits(1, 4, 20, 256, 128)  # an idle row of four costs more than the padding


def test_prompts_that_wait_are_read_together_and_change_no_token(monkeypatch):
    chosen = noted(
        monkeypatch,
        Prefiller,
        "choose_mixed",
        lambda read, prefiller, sequences, rows, nodes: (len(sequences), len(read)),
    )
    engine = with_tree(tiny_model("llama", max_position_embeddings=1024), tiny_drafter(), 2, 3)
    served = scheduler(engine, blocks=600, max_batch_size=48)
    params = SamplingParams(temperature=0)
    running = [make_sequence([1 + row, 5], 90, params) for row in range(16)]
    until_stepping(served, *running)
    late = []
    for number in range(24):
        late.append(make_sequence([3 + (number + 7 * index) % 60 for index in range(9)], 5, params))
        served.submit(late[-1])
        served.round()
    while not served.idle:
        served.round()
    assert any(prompts and not read for prompts, read in chosen)
    assert max(read for _, read in chosen) > 1
    same_alone(engine, [*running, *late])
