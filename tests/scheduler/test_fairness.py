"""Nobody starves: who is begun next, what a round reads, and who gives a place up."""

import asyncio
import random

import pytest

from helpers.scheduling import KINDS, Sink, alone, nothing_is_held, random_sequences, run, scheduler
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.limits import Limits, QueueFullError
from redrafter.scheduler.prefill import (
    MIN_FORWARD_TOKENS,
    TARGET_SECONDS,
    Chunk,
    PrefilledRows,
    PrefillPace,
    choose_chunks,
    padded_tokens,
)
from redrafter.scheduler.row_caches import RowCaches
from redrafter.scheduler.running_set import MAX_CANCELLATIONS_PER_ROUND, MIN_ROUNDS_IN_PLACE
from redrafter.scheduler.scheduler import Scheduler
from redrafter.scheduler.sequence import TokenSequence
from redrafter.scheduler.waiting_queue import MAX_REMEMBERED_CLIENTS, SPARE_HEAP_ENTRIES, WaitingQueue

GREEDY = KINDS["greedy"]


def make_sequence(
    client: str, prompt: list[int] | None = None, max_new_tokens: int = 4, params: SamplingParams = GREEDY, **more
) -> TokenSequence:
    return TokenSequence(prompt or [5, 6, 7], max_new_tokens, params, Sink(), client=client, **more)


class Slow:
    """The same queue, with everything searched for."""

    def __init__(self) -> None:
        self.waiting: list[TokenSequence] = []
        self.placed: list[TokenSequence] = []
        self.used: dict[str, float] = {}
        self.fair = 0.0

    def places(self, client: str) -> int:
        return sum(each.client == client for each in self.placed)

    def add(self, sequence: TokenSequence) -> None:
        if all(each.client != sequence.client for each in self.waiting):
            self.used[sequence.client] = max(self.used.get(sequence.client, 0), self.fair)
        self.waiting.append(sequence)

    def firsts(self) -> list[TokenSequence]:
        """Of every client whose turn it may be, the first text."""
        heads = {each.client: each for each in reversed(self.waiting)}.values()
        if not heads:
            return []
        rank = {each: (self.places(each.client) > 0, self.used[each.client]) for each in heads}
        return [each for each in heads if rank[each] == min(rank.values())]

    def start(self, sequence: TokenSequence) -> None:
        self.fair = max(self.fair, min(self.used[each.client] for each in self.waiting))
        self.waiting.remove(sequence)
        self.placed.append(sequence)

    def charge(self, sequence: TokenSequence, tokens: int) -> None:
        self.used[sequence.client] += tokens
        self.fair += tokens / len({each.client for each in (*self.waiting, *self.placed)})

    def put_back(self, sequence: TokenSequence) -> None:
        self.placed.remove(sequence)
        self.waiting.insert(0, sequence)

    def check(self, queue: WaitingQueue) -> None:
        first = queue.first()
        assert (first in self.firsts()) if self.waiting else first is None
        assert len(queue) == len(self.waiting)
        assert queue.waiting_clients == len({each.client for each in self.waiting})
        for client in self.used:
            assert queue.waiting(client) == sum(each.client == client for each in self.waiting)
            assert queue.running(client) == self.places(client)


@pytest.mark.parametrize("clients", [1, 3, 40])
def test_the_queue_agrees_with_a_slow_obvious_one(clients):
    made, queue, slow = random.Random(clients), WaitingQueue(), Slow()
    for _ in range(1200):
        action = made.random()
        if action < 0.35 and len(slow.waiting) < 60:
            new = make_sequence(f"{made.randrange(clients)}")
            queue.add(new)
            slow.add(new)
        elif action < 0.6 and slow.waiting:
            first = queue.first()
            queue.start(first)
            slow.start(first)
        elif action < 0.7 and slow.waiting:
            gone = made.choice(slow.waiting)
            queue.remove(gone)
            slow.waiting.remove(gone)
        elif slow.placed:
            placed = made.choice(slow.placed)
            tokens = made.randrange(30)
            queue.charge(placed, tokens)
            slow.charge(placed, tokens)
            if action < 0.75:
                queue.put_back(placed)
                slow.put_back(placed)
            elif action < 0.9:
                queue.end(placed)
                slow.placed.remove(placed)
        slow.check(queue)
    assert sorted(map(id, queue.clear())) == sorted(map(id, slow.waiting))
    assert len(queue) == queue.waiting_clients == 0
    assert queue.first() is None


def test_a_million_clients_leave_nothing_behind():
    queue = WaitingQueue()
    stays = make_sequence("stays")
    queue.add(stays)
    for number in range(30_000):
        each = make_sequence(f"{number}")
        queue.add(each)
        if number % 3 == 0:
            queue.remove(each)
            continue
        queue.start(each)
        queue.charge(each, 1 + number % 7)
        queue.end(each)
    assert queue.clients == 1
    assert queue.remembered_clients <= MAX_REMEMBERED_CLIENTS
    assert all(size <= 2 + SPARE_HEAP_ENTRIES for size in queue.heap_sizes)


def test_who_comes_back_has_no_claim_to_the_past_and_no_clean_slate():
    queue = WaitingQueue()
    greedy, modest = make_sequence("greedy"), make_sequence("modest")
    for each in (greedy, modest):
        queue.add(each)
        queue.start(each)
    queue.charge(greedy, 1000)  # of which 500 were its share
    for each in (greedy, modest):
        queue.end(each)
    late = [make_sequence("late") for _ in range(3)]
    again = [make_sequence("greedy") for _ in range(3)]
    for each in (*again, *late):
        queue.add(each)
    order = []
    while (first := queue.first()) is not None:
        queue.start(first)
        queue.charge(first, 400)
        order.append(first.client)
    # Each is given one place; then the one with fewer tokens goes first until both have had as many.
    assert order == ["late", "greedy", "late", "late", "greedy", "greedy"]


def test_no_number_of_new_clients_keeps_an_older_one_waiting():
    queue, places = WaitingQueue(), []
    for client in ("old", "other"):
        places.append(make_sequence(client))
        queue.add(places[-1])
        queue.start(places[-1])
    queue.charge(places[0], 1000)
    queue.end(places.pop(0))
    old, new = make_sequence("old"), []
    queue.add(old)
    for number in range(1000):  # more clients come all the time than places become free
        new += [make_sequence(f"{number}, once"), make_sequence(f"{number}, once more")]
        for each in new[-2:]:
            queue.add(each)
        new = [each for each in new if each in queue]
        while len(new) > 10:
            queue.remove(new.pop(0))
        first = queue.first()
        if first is old:
            break
        queue.start(first)
        queue.charge(first, 40)
        places.append(first)
        if len(places) > 4:
            queue.end(places.pop(0))
    assert first is old


def used(sequences: list[TokenSequence]) -> dict[str, int]:
    return {
        client: sum(each.written + len(each.prompt) for each in sequences if each.client == client and each.written)
        for client in "ab"
    }


def test_clients_get_equally_many_tokens_however_many_texts_they_send(engine):
    served = scheduler(engine, max_batch_size=4)
    sequences = [make_sequence("a", max_new_tokens=12) for _ in range(60)] + [
        make_sequence("b", max_new_tokens=6) for _ in range(60)
    ]
    for each in sequences:
        served.submit(each)
    for _ in range(60):
        served.round()
    total = used(sequences)
    assert min(total.values()) > 150, total
    assert abs(total["a"] - total["b"]) < 0.2 * min(total.values()), total


def test_one_text_does_not_wait_for_the_hundreds_of_another_client(engine):
    served = scheduler(engine, max_batch_size=4)
    many = [make_sequence("many", [5, 6, 7 + n % 50], max_new_tokens=6) for n in range(300)]
    served.submit(*many)
    for _ in range(5):
        served.round()
    one = make_sequence("one", [8, 9], max_new_tokens=4)
    served.submit(one)
    rounds = 0
    while not one.ended:
        served.round()
        rounds += 1
    assert rounds < 2 * MIN_ROUNDS_IN_PLACE
    assert sum(each.ended for each in many) < 100
    assert one.sink.tokens == alone(engine, one)
    served.cancel(*many)
    run(served, [])


def test_a_client_that_holds_every_place_gives_one_up_and_writes_the_same(engine):
    served = scheduler(engine, max_batch_size=4, max_num_tokens=64, speculate=False)
    long = [
        make_sequence("long", [5 + n, 9, 11], 36, kind) for n, kind in enumerate((GREEDY, *list(KINDS.values())[:4]))
    ]
    served.submit(*long)
    for _ in range(MIN_ROUNDS_IN_PLACE - 4):
        served.round()
    others = [make_sequence(f"other {n}", [8, 9 + n], max_new_tokens=3) for n in range(3)]
    served.submit(*others)
    served.round()
    assert not any(each.written for each in others)
    assert not served.preempted
    for _ in range(8):
        served.round()
    assert all(each.ended for each in others)
    assert not any(each.ended for each in long)
    assert served.preempted == 3
    assert long[0].admitted_round == 1
    run(served, [])
    for each in (*long, *others):
        assert each.sink.tokens == alone(engine, each)
    nothing_is_held(served)


def test_nobody_gives_a_place_up_twice_at_once_nor_a_last_one(engine):
    served = scheduler(engine, max_batch_size=2, speculate=False)
    long = [make_sequence("a", [5], 80), make_sequence("b", [6], 80)]
    served.submit(*long)
    for _ in range(MIN_ROUNDS_IN_PLACE + 1):
        served.round()
    third = make_sequence("c", [7], 3)
    served.submit(third)
    for _ in range(MIN_ROUNDS_IN_PLACE + 1):
        served.round()
    assert not served.preempted
    assert not third.written
    run(served, [])

    served = scheduler(engine, max_batch_size=2, speculate=False)
    long = [make_sequence("a", [5], 80), make_sequence("a", [6], 80)]
    served.submit(*long)
    served.round()
    for number in range(60):  # a client with one token after another
        served.submit(make_sequence(f"one {number}", [7, 8], 1))
        served.round()
    assert 1 <= served.preempted <= 60 // MIN_ROUNDS_IN_PLACE
    assert long[0].written > 55
    assert long[1].written >= MIN_ROUNDS_IN_PLACE
    served.cancel_all()
    run(served, [])


def test_nobody_gives_a_place_up_where_that_is_promised(engine):
    served = scheduler(engine, max_batch_size=2, guaranteed_no_evict=True)
    long = [make_sequence("a", [5], 60), make_sequence("a", [6], 60)]
    served.submit(*long)
    for _ in range(MIN_ROUNDS_IN_PLACE + 1):
        served.round()
    other = make_sequence("b", [7], 3)
    run(served, [other])
    assert not served.preempted


def test_a_client_without_blocks_is_given_those_of_another(engine):
    served = scheduler(engine, blocks=16, max_batch_size=8, speculate=False, max_num_tokens=200)
    many = [make_sequence("many", [5 + n], 40) for n in range(4)]
    served.submit(*many)
    for _ in range(2 * MIN_ROUNDS_IN_PLACE):
        served.round()
    other = make_sequence("other", [3 + n % 60 for n in range(64)], 4)
    served.submit(other)
    while not other.ended:
        served.round()
    assert served.preempted
    assert not all(each.ended for each in many)
    run(served, [])
    for each in (*many, other):
        assert each.sink.tokens == alone(engine, each)
    nothing_is_held(served)


@pytest.mark.parametrize("limits", [{}, {"max_num_tokens": 40}, {"chunked": False}, {"reuse": False}], ids=str)
def test_texts_of_many_clients_that_come_and_go_are_what_each_is_alone(limits, engine):
    served, made = scheduler(engine, blocks=16, max_batch_size=4, speculate=False, **limits), random.Random(3)
    sequences = random_sequences(16, seed=9, longest=50, max_new_tokens=40)
    for number, each in enumerate(sequences):
        each.client = "abcdefg"[min(made.randrange(12), 6)] if number % 4 else "a"
        each.cache_salt = made.choice([None, "x"])
        served.submit(each)
        for _ in range(made.randrange(5)):
            served.round()
        if number % 9 == 8:
            served.cancel(each)
    run(served, [])
    assert served.preempted
    for each in sequences:
        assert each.ended
        assert each.cancelled or each.sink.tokens == alone(engine, each)
    nothing_is_held(served)
    assert not served.clients


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
    assert served.waiting == 58
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


def reading(*left: int) -> list[TokenSequence]:
    return [make_sequence(f"{n}", [5] * tokens) for n, tokens in enumerate(left)]


@pytest.mark.parametrize("padded", [False, True])
def test_a_short_prompt_is_read_beside_a_long_one_and_the_long_one_gets_on(padded):
    texts = reading(5000, 4000, 3)
    [shares] = choose_chunks(texts, 256, padded, chunked=True)
    found = dict(shares)
    assert found[texts[2]] == 3
    assert found[texts[0]] >= 64
    assert padded_tokens(shares, padded) <= 256
    texts = reading(5000, *[3] * 200)
    [shares] = choose_chunks(texts, 256, padded, chunked=True)
    found = dict(shares)
    assert found[texts[0]] >= 3
    assert sum(found.get(each, 0) == 3 for each in texts[1:]) >= 42


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_what_a_forward_reads_fits_and_everything_is_read(padded, chunked):
    made = random.Random(padded + 2 * chunked)
    for _ in range(300):
        texts = reading(*(made.choice((1, 3, 20, 300)) for _ in range(made.randrange(1, 9))))
        budget, forwards = made.choice((16, 60, 500)), 0
        while texts:
            for shares in choose_chunks(texts, budget, padded, chunked):
                assert shares
                assert len(dict(shares)) == len(shares)
                for each, share in shares:
                    assert 0 < share <= each.prefill_length - each.prefilled
                    assert chunked or share == each.prefill_length
                    each.prefilled += share
                alone_and_whole = not chunked and len(shares) == 1
                assert padded_tokens(shares, padded) <= budget or alone_and_whole
            oldest = texts[0]
            assert oldest.prefilled
            assert chunked or oldest.prefilled == oldest.prefill_length
            texts = [each for each in texts if each.prefilled < each.prefill_length]
            forwards += 1
            assert forwards < 400


def test_the_pace_follows_the_machine():
    pace = PrefillPace(8192)
    for _ in range(20):
        pace.measure(pace.tokens, pace.tokens * 1e-3)  # a thousand tokens a second
    assert pace.tokens == pytest.approx(1000 * TARGET_SECONDS, rel=0.1)
    pace.measure(3, 0.02)  # a short prompt is slow by the token, and says nothing
    assert pace.tokens == pytest.approx(1000 * TARGET_SECONDS, rel=0.1)
    pace.measure(pace.tokens, 100.0)  # one that stood still for a while does not slow all that follow
    assert pace.tokens >= MIN_FORWARD_TOKENS
    for _ in range(20):
        pace.measure(pace.tokens, 1e-4)
    assert pace.tokens == 8192
    for _ in range(20):
        pace.measure(pace.tokens, 1e3)
    assert pace.tokens == MIN_FORWARD_TOKENS


def test_no_round_reads_more_than_its_pace(engine, monkeypatch):
    served, chunks = scheduler(engine), []
    forward = served.prefiller.forward

    def counted(chosen: list[Chunk], caches: RowCaches) -> PrefilledRows:
        chunks.append(max(count for _, count in chosen))
        return forward(chosen, caches)

    monkeypatch.setattr(served.prefiller, "forward", counted)
    monkeypatch.setattr(PrefillPace, "measure", lambda self, tokens, seconds: None)
    served.prefiller.pace.tokens = 2 * BLOCK_SIZE
    long = make_sequence("a", [3 + n % 50 for n in range(75)])
    run(served, [long])
    assert chunks == [32, 32, 11]
    assert long.sink.tokens == alone(engine, long)


def test_the_queue_counts_what_cannot_begin(engine):
    served = scheduler(engine, max_batch_size=3, max_queue_size=2)
    served.submit(*(make_sequence("a") for _ in range(9)))  # nobody waits: as many as one request has
    run(served, [])
    for _ in range(5):
        served.submit(make_sequence("a"))  # three of them begin at once
    with pytest.raises(QueueFullError, match=r"5 texts are waiting, 5 of them yours.*max_queue_size is 2"):
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
    assert served.waiting <= 16
    served.cancel_all()
    run(served, [])


@pytest.mark.parametrize(
    "where", ["paged_memory.SequenceBlocks.allocate", "prefill.choose_chunks", "running_batch.RunningBatch.step"]
)
def test_a_round_that_fails_loses_nobody_who_waits(where, engine, monkeypatch):
    served = scheduler(engine, max_batch_size=2)
    sequences = [make_sequence(f"{n % 3}", [5 + n], 5) for n in range(10)]
    served.submit(*sequences)
    with monkeypatch.context() as patched:
        patched.setattr(f"redrafter.scheduler.{where}", lambda *_, **__: 1 / 0)
        served.round()
    failed = [each for each in sequences if each.ended]
    assert 1 <= len(failed) <= 2
    assert served.waiting == 10 - len(failed)
    assert all(isinstance(each.sink.deltas[-1].error, ZeroDivisionError) for each in failed)
    run(served, [])
    assert all(each.sink.tokens == alone(engine, each) for each in sequences if each not in failed)
    assert not served.clients
    nothing_is_held(served)


def test_beginnings_are_shared_only_under_the_same_salt(engine):
    served, prompt = scheduler(engine), [3 + n % 60 for n in range(40)]
    for salt, reused in ((None, 0), ("a", 0), ("a", 32), (None, 32), ("b", 0)):
        each = make_sequence("x", prompt, cache_salt=salt)
        run(served, [each])
        assert each.reused == reused
        assert each.sink.tokens == alone(engine, each)


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
    monkeypatch.setattr(served, "submit", lambda *sent: (clients.extend(each.client for each in sent), submit(*sent)))
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
    second = Scheduler(engine, first.graphs, Limits(guaranteed_no_evict=not evicts))
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
    for sequence in begun:
        assert sequence.sink.tokens == alone(engine, sequence)
    nothing_is_held(first)
    assert not first.graphs.turns


def test_a_scheduler_that_is_given_up_while_it_waits_keeps_nobody_waiting(engine):
    first = scheduler(engine, blocks=5, guaranteed_no_evict=True)
    second = Scheduler(engine, first.graphs, Limits(guaranteed_no_evict=True))
    mine = [make_sequence("", list(range(5, 25)), 9) for _ in range(2)]
    first.submit(*mine)
    first.round()
    second.submit(make_sequence("", [5, 6, 7], 9))
    second.round()
    assert first.graphs.turns
    second.abandon()
    run(first, [])
    assert [sequence.written for sequence in mine] == [9, 9]
