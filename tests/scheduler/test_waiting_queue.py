"""The queue of waiting sequences: whose turn it is."""

import random

import pytest

from helpers.scheduling import KINDS, Sink
from redrafter.scheduler.request import GenerationRequest
from redrafter.scheduler.sequence import TokenSequence
from redrafter.scheduler.waiting_queue import MAX_REMEMBERED_ACCOUNTS, SPARE_LEVELS, WaitingQueue


def make_sequence(client: str, priority: int = 0) -> TokenSequence:
    return TokenSequence(GenerationRequest([5, 6, 7], 4, KINDS["greedy"], client=client, priority=priority), Sink())


class Slow:
    """The same queue, with everything searched for."""

    def __init__(self) -> None:
        self.waiting: list[TokenSequence] = []
        self.placed: list[TokenSequence] = []
        self.used: dict[str, float] = {}
        self.fair = 0.0

    def places(self, client: str) -> int:
        return sum(each.request.client == client for each in self.placed)

    def add(self, sequence: TokenSequence) -> None:
        if all(each.request.client != sequence.request.client for each in self.waiting):
            self.used[sequence.request.client] = max(self.used.get(sequence.request.client, 0), self.fair)
        self.waiting.append(sequence)

    def firsts(self) -> list[TokenSequence]:
        """Of every client whose turn it may be, the first text."""
        heads = {each.request.client: each for each in reversed(self.waiting)}.values()
        if not heads:
            return []
        rank = {each: (self.places(each.request.client) > 0, self.used[each.request.client]) for each in heads}
        return [each for each in heads if rank[each] == min(rank.values())]

    def start(self, sequence: TokenSequence) -> None:
        self.fair = max(self.fair, min(self.used[each.request.client] for each in self.waiting))
        self.waiting.remove(sequence)
        self.placed.append(sequence)

    def charge(self, sequence: TokenSequence, tokens: int) -> None:
        self.used[sequence.request.client] += tokens
        self.fair += tokens / len({each.request.client for each in (*self.waiting, *self.placed)})

    def put_back(self, sequence: TokenSequence) -> None:
        self.placed.remove(sequence)
        self.waiting.insert(0, sequence)


class SlowByPriority(dict[int, Slow]):
    """One for each priority."""

    def __missing__(self, priority: int) -> Slow:
        self[priority] = Slow()
        return self[priority]

    @property
    def waiting(self) -> list[TokenSequence]:
        return [each for slow in self.values() for each in slow.waiting]

    @property
    def placed(self) -> list[TokenSequence]:
        return [each for slow in self.values() for each in slow.placed]

    def check(self, queue: WaitingQueue) -> None:
        first, waiting, placed = queue.first(), self.waiting, self.placed
        if waiting:
            assert first in self[min(each.request.priority for each in waiting)].firsts()
        else:
            assert first is None
        assert len(queue) == len(waiting)
        for client in {client for slow in self.values() for client in slow.used}:
            assert queue.waiting(client) == sum(each.request.client == client for each in waiting)
        for each in (*waiting, *placed):
            assert queue.running(each) == self[each.request.priority].places(each.request.client)


@pytest.mark.parametrize("priorities", [(0,), (0, 7, -2)], ids=str)
@pytest.mark.parametrize("clients", [1, 3, 40])
def test_the_queue_agrees_with_a_slow_obvious_one(clients, priorities):
    made, queue, slow = random.Random(clients), WaitingQueue(), SlowByPriority()
    for _ in range(1200):
        action = made.random()
        if action < 0.35 and len(slow.waiting) < 60:
            new = make_sequence(f"{made.randrange(clients)}", made.choice(priorities))
            queue.add(new)
            slow[new.request.priority].add(new)
        elif action < 0.6 and slow.waiting:
            first = queue.first()
            queue.start(first)
            slow[first.request.priority].start(first)
        elif action < 0.7 and slow.waiting:
            gone = made.choice(slow.waiting)
            queue.remove(gone)
            slow[gone.request.priority].waiting.remove(gone)
        elif slow.placed:
            placed = made.choice(slow.placed)
            tokens = made.randrange(30)
            queue.charge(placed.account, tokens)
            slow[placed.request.priority].charge(placed, tokens)
            if action < 0.75:
                queue.put_back(placed)
                slow[placed.request.priority].put_back(placed)
            elif action < 0.9:
                queue.end(placed)
                slow[placed.request.priority].placed.remove(placed)
        slow.check(queue)
    assert sorted(map(id, queue.clear())) == sorted(map(id, slow.waiting))
    assert len(queue) == 0
    assert queue.first() is None


def test_any_number_of_priorities_leaves_nothing_behind():
    """A client may send a priority of its own with each request, such as the time of day."""
    queue, made, kept = WaitingQueue(), random.Random(0), []
    stays = make_sequence("stays", -1)
    queue.add(stays)
    for number in range(5000):
        each = make_sequence("a", made.randrange(1 << 30))
        queue.add(each)
        kept.append(each)
        if number % 4 == 0:
            queue.remove(kept.pop(made.randrange(len(kept))))
        if len(kept) > 40:
            assert queue.first() is stays
            queue.remove(stays)
            first = queue.first()
            assert first.request.priority == min(each.request.priority for each in kept)
            kept.remove(first)
            queue.start(first)
            queue.end(first)
            queue.add(stays)
    assert queue.entries <= 6 * 42 + 3 * SPARE_LEVELS
    assert {each.request.priority for each in queue.clear()} == {each.request.priority for each in (stays, *kept)}


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
        queue.charge(each.account, 1 + number % 7)
        queue.end(each)
    assert queue.entries <= MAX_REMEMBERED_ACCOUNTS + 3 * SPARE_LEVELS
