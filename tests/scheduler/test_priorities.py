"""Sequences of lower priority numbers come first, and take slots and blocks of others, which write the same texts."""

import pytest

from helpers.scheduling import KINDS, Sink, nothing_is_held, run, same_alone, scheduler
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.prefill import choose_chunks
from redrafter.scheduler.request import GenerationRequest
from redrafter.scheduler.scheduler import Scheduler
from redrafter.scheduler.sequence import TokenSequence

GREEDY = KINDS["greedy"]


def make_sequence(
    priority: int, prompt: list[int] | None = None, new: int = 4, params: SamplingParams = GREEDY, client: str = ""
) -> TokenSequence:
    return TokenSequence(GenerationRequest(prompt or [5, 6, 7], new, params, client=client, priority=priority), Sink())


def rounds(served: Scheduler, count: int) -> None:
    for _ in range(count):
        served.round()


def test_lower_numbers_are_served_first_and_equal_ones_in_the_order_of_their_arrival(engine):
    served = scheduler(engine, max_batch_size=1)
    sent = [make_sequence(priority, [5, 6, 7 + n]) for n, priority in enumerate((3, 0, -1, 3, 0, 1 << 30))]
    for each in sent:
        served.submit(each)
    ended: list[int] = []
    while not served.idle:
        served.round()
        ended += [n for n, each in enumerate(sent) if each.ended and n not in ended]
    assert ended == [2, 1, 4, 0, 3, 5]
    assert not served.running_set.preempted
    same_alone(engine, sent)


@pytest.mark.parametrize("kind", ["greedy", "sampled", "penalised"])
def test_who_waits_takes_the_slot_of_the_newest_of_the_highest_number(kind, engine):
    served = scheduler(engine, max_batch_size=4)
    running = [make_sequence(n, [8 + i, 9], 60, KINDS[kind]) for i, n in enumerate((7, 1, 7, 5))]
    served.submit(*running)
    rounds(served, 4)
    written = [each.written for each in running]
    assert all(written)  # of which each has some to keep
    urgent = [make_sequence(0, [20 + i, 21], 5, KINDS[kind]) for i in range(3)]
    for each, gone in zip(urgent, (2, 0, 3), strict=True):
        served.submit(each)
        served.round()
        assert each.admission.round is not None  # at once, though its client has slots and these are new
        assert running[gone].row is None
        assert running[gone].block_table is None
    assert served.running_set.preempted == 3
    assert running[1].row is not None
    run(served, [])
    assert served.running_set.preempted == 3
    same_alone(engine, [*running, *urgent])
    nothing_is_held(served)


def test_who_waits_takes_blocks_of_higher_numbers_only_if_they_are_enough(engine):
    served = scheduler(engine, blocks=7, max_batch_size=8, speculate=False)
    background = [make_sequence(2, [5 + n, 6], 40) for n in range(3)]
    served.submit(*background)
    rounds(served, 6)
    long = make_sequence(1, [3 + n % 60 for n in range(64)], 4)
    served.submit(long)
    rounds(served, 1)
    assert long.block_table is not None
    assert served.running_set.preempted >= 2
    before = served.running_set.preempted
    other = make_sequence(1, [4 + n % 60 for n in range(64)], 4)
    served.submit(other)  # which needs blocks of its own number, and waits for them
    served.round()
    assert other.block_table is None
    assert served.running_set.preempted == before
    run(served, [])
    same_alone(engine, [*background, long, other])
    nothing_is_held(served)


def test_rows_that_grow_take_blocks_of_the_highest_number(engine):
    served = scheduler(engine, blocks=12, max_batch_size=8, speculate=False)
    urgent = make_sequence(-1, [30, 31], 60)
    others = [make_sequence(n, [5 + n, 6], 60) for n in (4, 0, 4)]
    served.submit(*others, urgent)  # it came last
    run(served, [])
    assert served.running_set.preempted
    assert urgent.admission.round == 1  # it has kept its slot to its end
    same_alone(engine, [urgent, *others])
    nothing_is_held(served)


def test_a_client_without_a_slot_takes_none_of_a_lower_number(engine):
    served = scheduler(engine, max_batch_size=2)
    held = [make_sequence(0, [5 + n], 60, client="a") for n in range(2)]
    served.submit(*held)
    served.round()
    other = make_sequence(1, client="b")
    served.submit(other)
    while not any(each.ended for each in held):
        assert not other.written
        served.round()
    assert not served.running_set.preempted
    run(served, [])
    same_alone(engine, [*held, other])


def test_within_a_number_clients_without_a_slot_are_given_one_as_ever(engine):
    served = scheduler(engine, max_batch_size=3, speculate=False)
    first = make_sequence(0, [9], 60, client="b")
    many = [make_sequence(6, [5 + n], 60, client="a") for n in range(2)]
    served.submit(first)
    served.submit(*many)
    rounds(served, 20)
    other = make_sequence(6, [7, 8], 3, client="b")  # it has a slot, but none of this number
    served.submit(other)
    served.round()
    assert other.admission.round is not None
    assert many[1].row is None
    assert served.running_set.preempted == 1
    run(served, [])
    same_alone(engine, [first, *many, other])


def test_nobody_gives_way_where_that_is_promised_but_the_order_stays(engine):
    served = scheduler(engine, max_batch_size=2, guaranteed_no_evict=True)
    running = [make_sequence(5, [5 + n], 30) for n in range(2)]
    served.submit(*running)
    rounds(served, 2)
    late = [make_sequence(n, [9, 9 + n], 3) for n in (4, 1)]
    served.submit(*late)
    while not late[1].written:
        assert not late[0].written
        served.round()
    run(served, [])
    assert not served.running_set.preempted
    same_alone(engine, [*running, *late])


def test_a_higher_number_waits_as_long_as_lower_ones_come_and_then_goes_on(engine):
    served = scheduler(engine, max_batch_size=1)
    background, urgent = make_sequence(1, [5], 40), [make_sequence(0, [6, 7], 9)]
    served.submit(background)
    rounds(served, 2)
    served.submit(*urgent)
    served.round()
    written = background.written
    assert 0 < written < 40
    for n in range(8):
        urgent.append(make_sequence(0, [6, 8 + n], 9))
        served.submit(urgent[-1])
        while not urgent[-2].ended:
            served.round()
    assert background.written == written
    run(served, [])
    assert served.running_set.preempted == 1
    same_alone(engine, [background, *urgent])


def test_prompts_of_lower_numbers_are_read_first():
    texts = [make_sequence(priority, [5] * length) for priority, length in ((1, 40), (1, 10), (0, 90), (0, 60))]
    for arrival, each in enumerate(texts):
        each.admission.arrival = arrival
    [chunks] = choose_chunks(texts, 120, padded=False, chunked=True)
    assert dict(chunks) == {texts[2]: 60, texts[3]: 60}  # the shorter one has half, and the first one the rest
    [chunks] = choose_chunks(texts, 155, padded=False, chunked=True)
    assert dict(chunks) == {texts[2]: 90, texts[3]: 60, texts[0]: 5}
    [chunks] = choose_chunks(texts, 60, padded=True, chunked=True)
    assert dict(chunks) == {texts[2]: 30, texts[3]: 30}
    *_, chunks = choose_chunks(texts, 50, padded=False, chunked=False)
    assert chunks == [(texts[2], 90)]  # whole, since nothing is cut
