"""Nobody starves: who is begun next, what a round reads, and who gives a place up."""

import asyncio

import pytest

from helpers.scheduling import KINDS, Sink, nothing_is_held, run, same_alone, scheduler
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.request import GenerationRequest
from redrafter.scheduler.running_set import MAX_CANCELLATIONS_PER_ROUND, MIN_ROUNDS_IN_PLACE
from redrafter.scheduler.scheduler import Scheduler
from redrafter.scheduler.sequence import TokenSequence
from redrafter.scheduler.waiting_queue import Limits, QueueFullError

GREEDY = KINDS["greedy"]


def make_sequence(
    client: str, prompt: list[int] | None = None, max_new_tokens: int = 4, params: SamplingParams = GREEDY, **more
) -> TokenSequence:
    return TokenSequence(GenerationRequest(prompt or [5, 6, 7], max_new_tokens, params, client=client, **more), Sink())


def rounds(served: Scheduler, count: int) -> None:
    for _ in range(count):
        served.round()


def test_clients_get_equally_many_tokens_however_many_texts_they_send(engine):
    served = scheduler(engine, max_batch_size=4)
    sent = [[make_sequence(client, max_new_tokens=new) for _ in range(60)] for client, new in (("a", 12), ("b", 6))]
    for sequences in sent:
        served.submit(*sequences)
    rounds(served, 64)
    used = [sum(each.written + len(each.request.prompt) for each in sequences if each.written) for sequences in sent]
    assert min(used) > 150, used
    assert max(used) - min(used) < 0.2 * min(used), used


def test_one_text_does_not_wait_for_the_hundreds_of_another_client(engine):
    served = scheduler(engine, max_batch_size=4)
    many = [make_sequence("many", [5, 6, 7 + n % 50], max_new_tokens=6) for n in range(300)]
    served.submit(*many)
    rounds(served, 5)
    one = make_sequence("one", [8, 9], max_new_tokens=4)
    served.submit(one)
    count = 0
    while not one.ended:
        served.round()
        count += 1
    assert count < 2 * MIN_ROUNDS_IN_PLACE
    assert sum(each.ended for each in many) < 100
    same_alone(engine, [one])
    served.cancel(*many)
    run(served, [])


def test_a_client_that_holds_every_place_gives_one_up_and_writes_the_same(engine):
    served = scheduler(engine, max_batch_size=4, max_num_tokens=64, speculate=False)
    kinds = (GREEDY, *list(KINDS.values())[:4])
    long = [make_sequence("long", [5 + n, 9, 11], 36, kind) for n, kind in enumerate(kinds)]
    served.submit(*long)
    rounds(served, MIN_ROUNDS_IN_PLACE - 4)
    others = [make_sequence(f"other {n}", [8, 9 + n], max_new_tokens=3) for n in range(3)]
    served.submit(*others)
    served.round()
    assert not any(each.written for each in others)
    assert not served.running_set.preempted
    rounds(served, 8)
    assert all(each.ended for each in others)
    assert not any(each.ended for each in long)
    assert served.running_set.preempted == 3
    assert long[0].admission.round == 1
    run(served, [])
    same_alone(engine, [*long, *others])
    nothing_is_held(served)


def test_nobody_gives_a_place_up_twice_at_once_nor_a_last_one(engine):
    served = scheduler(engine, max_batch_size=2, speculate=False)
    long = [make_sequence("a", [5], 80), make_sequence("b", [6], 80)]
    served.submit(*long)
    rounds(served, MIN_ROUNDS_IN_PLACE + 1)
    third = make_sequence("c", [7], 3)
    served.submit(third)
    rounds(served, MIN_ROUNDS_IN_PLACE + 1)
    assert not served.running_set.preempted
    assert not third.written
    run(served, [])

    served = scheduler(engine, max_batch_size=2, speculate=False)
    long = [make_sequence("a", [5], 80), make_sequence("a", [6], 80)]
    served.submit(*long)
    served.round()
    for number in range(60):  # a client with one token after another
        served.submit(make_sequence(f"one {number}", [7, 8], 1))
        served.round()
    assert 1 <= served.running_set.preempted <= 60 // MIN_ROUNDS_IN_PLACE
    assert long[0].written > 55
    assert long[1].written >= MIN_ROUNDS_IN_PLACE
    served.cancel_all()
    run(served, [])


def test_a_client_without_blocks_is_given_those_of_another(engine):
    served = scheduler(engine, blocks=16, max_batch_size=8, speculate=False, max_num_tokens=200)
    many = [make_sequence("many", [5 + n], 40) for n in range(4)]
    served.submit(*many)
    rounds(served, 2 * MIN_ROUNDS_IN_PLACE)
    other = make_sequence("other", [3 + n % 60 for n in range(64)], 4)
    served.submit(other)
    while not other.ended:
        served.round()
    assert served.running_set.preempted
    assert not all(each.ended for each in many)
    run(served, [])
    same_alone(engine, [*many, other])
    nothing_is_held(served)


def test_a_cancelled_text_costs_nothing_while_hundreds_of_others_wait(engine, monkeypatch):
    """No call looks at texts that it is not about."""
    served = scheduler(engine, max_batch_size=2, max_queue_size=0)
    sequences = [make_sequence(f"{n % 24}", max_new_tokens=30) for n in range(MAX_CANCELLATIONS_PER_ROUND + 600)]
    served.submit(*sequences)
    served.round()
    left = sequences[60:]
    touched = []
    monkeypatch.setattr(TokenSequence, "__eq__", lambda self, other: touched.append(1) or self is other)
    served.cancel(*left)
    assert served.running_set.waiting == 58
    assert not any(each.ended for each in left)
    served.round()
    assert sum(each.ended for each in left) == MAX_CANCELLATIONS_PER_ROUND  # a round tells so many at most
    running = next(each for each in sequences[:60] if each.row is not None)
    served.cancel(running)
    served.round()
    assert running.ended  # what holds a place is not behind them
    served.round()
    assert all(each.ended and each.sink.deltas[-1].finish == "cancelled" for each in left)
    assert not touched
    served.cancel_all()
    run(served, [])
    assert all(each.ended for each in sequences)
    nothing_is_held(served)


def test_cancelling_what_was_never_submitted_does_nothing(engine):
    served, never = scheduler(engine), make_sequence("a")
    served.cancel(never)
    assert served.idle
    assert not never.cancelled
    run(served, [never])
    served.cancel(never)
    assert served.idle
    assert never.sink.deltas[-1].finish == "length"


def test_the_queue_counts_what_cannot_begin(engine):
    served = scheduler(engine, max_batch_size=3, max_queue_size=2)
    served.submit(*(make_sequence("a") for _ in range(9)))  # nobody waits: as many as one request has
    run(served, [])
    for _ in range(5):
        served.submit(make_sequence("a"))  # three of them begin at once
    with pytest.raises(QueueFullError, match=r"5 sequences are waiting, 5 of them yours.*max_queue_size is 2"):
        served.submit(make_sequence("a"))
    served.round()
    with pytest.raises(QueueFullError):
        served.submit(make_sequence("a"))
    run(served, [])


def test_one_client_cannot_fill_the_queue_for_all(engine):
    served = scheduler(engine, max_batch_size=1, max_queue_size=8)
    served.submit(make_sequence("hog", max_new_tokens=60))
    served.round()
    served.submit(*(make_sequence("hog") for _ in range(8)))
    with pytest.raises(QueueFullError):
        served.submit(make_sequence("hog"))
    with pytest.raises(QueueFullError):
        served.submit(*(make_sequence("a") for _ in range(5)))  # more than half
    served.submit(*(make_sequence("a") for _ in range(4)))
    served.submit(*(make_sequence("b") for _ in range(2)))
    with pytest.raises(QueueFullError):
        served.submit(make_sequence("b"))
    taken = 0
    with pytest.raises(QueueFullError):
        for number in range(99):  # nor can any number of clients
            served.submit(make_sequence(f"{number}"))
            taken += 1
    assert taken >= 2
    assert served.running_set.waiting <= 16
    served.cancel_all()
    run(served, [])


def test_a_request_is_served_for_its_client_and_under_its_salt(engine, monkeypatch):
    pytest.importorskip("fastapi")
    from pydantic import ValidationError
    from transformers import AutoTokenizer

    from helpers.engine_in_thread import client_of
    from redrafter import boxed_pair
    from redrafter.serve.network.api_keys import ApiKeys
    from redrafter.serve.protocol.requests import MAX_SALT_CHARACTERS, CompletionRequest
    from redrafter.serve.server import Server

    served, prompt, clients = scheduler(engine), [3 + n % 60 for n in range(40)], []
    submit = served.submit
    monkeypatch.setattr(
        served, "submit", lambda *sent: (clients.extend(each.request.client for each in sent), submit(*sent))
    )
    line = client_of(served)
    line.start()
    tokenizer = AutoTokenizer.from_pretrained(boxed_pair())

    def reused(service: Server, client: str, **more: str) -> int:
        request = CompletionRequest(prompt=prompt, max_tokens=2, temperature=0, **more)
        answer = asyncio.run(service.completion(request, {"client": client}))
        assert set(clients) == {client}
        clients.clear()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    together = Server(line, tokenizer)
    assert [reused(together, client) for client in "abc"] == [0, 32, 32]
    assert [reused(together, client, cache_salt="x") for client in "ab"] == [0, 32]
    assert reused(together, "a", cache_salt="y") == 0
    apart = Server(line, tokenizer, keys=ApiKeys(["a", "b"]))
    assert [reused(apart, client) for client in "aabb"] == [0, 32, 0, 32]
    assert [reused(apart, client, cache_salt="x") for client in "aabb"] == [0, 32, 0, 32]
    line.stop()
    for wrong in ("", "x" * (MAX_SALT_CHARACTERS + 1), 7):
        with pytest.raises(ValidationError):
            CompletionRequest(prompt="a", cache_salt=wrong)


@pytest.mark.parametrize("evicts", [False, True])
def test_schedulers_that_share_a_cache_take_turns_when_it_is_full(engine, evicts):
    """The cache has room for one sequence: who waits comes before what others submitted earlier but have not begun."""
    first = scheduler(engine, blocks=5, guaranteed_no_evict=not evicts)
    second = Scheduler(engine, first.memory, Limits(guaranteed_no_evict=not evicts))
    mine, theirs = [[make_sequence("", list(range(5, 25)), 9) for _ in range(3)] for _ in range(2)]
    begun: list[TokenSequence] = []
    first.submit(*mine)
    first.round()
    second.submit(*theirs)
    for _ in range(1000):
        for each in (first, first, second):
            each.round()
            begun += [sequence for sequence in (*mine, *theirs) if sequence.written and sequence not in begun]
        if first.idle and second.idle:
            break
    assert begun == [sequence for pair in zip(mine, theirs, strict=True) for sequence in pair]
    same_alone(engine, begun)
    nothing_is_held(first)
    assert not first.memory.turns


def test_a_scheduler_that_is_given_up_while_it_waits_keeps_nobody_waiting(engine):
    first = scheduler(engine, blocks=5, guaranteed_no_evict=True)
    second = Scheduler(engine, first.memory, Limits(guaranteed_no_evict=True))
    mine = [make_sequence("", list(range(5, 25)), 9) for _ in range(2)]
    first.submit(*mine)
    first.round()
    second.submit(make_sequence("", [5, 6, 7], 9))
    second.round()
    assert first.memory.turns
    second.abandon()
    run(first, [])
    assert [sequence.written for sequence in mine] == [9, 9]
