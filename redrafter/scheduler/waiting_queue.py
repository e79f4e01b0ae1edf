"""The waiting queue: which of the waiting texts is begun next, so that no client starves another.

Each client has a queue of its own, in the order in which its texts came, and an account of the tokens that the server
has worked for it: prompt tokens that were read, and tokens that were written. A free place goes

1. to a client that holds no place, if one waits, so that everybody gets on however many texts others have sent;
2. else to the client with the smallest account, so that clients that ask for more than there is get equally many
   tokens each, whether they send 500 texts or 5, and whether those are short or long.

The second is the virtual token counter of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024); like
fair queueing in routers, but without a guess of how long a text will become, since tokens are counted when they are
written. It also decides between several clients without a place.

A client that comes, or comes back, has no claim to what it did not ask for: its account starts at the fair account,
which is what a client has by now that always asked for more than it got. It grows with each token, by the share of one
client. So it overtakes every account in time, and no number of new clients can keep an older one from its turn. What a
client had used beyond it when it left is remembered for a while.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from redrafter.scheduler.sequence import TokenSequence

__all__ = ["WaitingQueue"]

REMEMBERED = 4096  # clients without any text whose accounts are kept
SPARE = 64  # entries of a heap that may be out of date, beside one for each client that waits


@dataclass(eq=False)
class _Client:
    """One client's account and texts.

    Attributes:
        used: Its account: tokens that were read and written for it.
        waiting: Its texts that wait, the next one first. A dict, so that any of them leaves at once.
        running: How many places its texts hold.
    """

    name: str
    used: float
    waiting: OrderedDict[TokenSequence, None] = field(default_factory=OrderedDict)
    running: int = 0


class _ByAccount:
    """A heap of clients, the one with the smallest account first.

    Accounts only grow, so an entry that is out of date stands too early: it is put right, or dropped, when it is first.
    Among equal accounts, the client whose entry has stood there longest is first.
    """

    def __init__(self, belongs: Callable[[_Client], bool]):
        """Args:
        belongs: Tells whether a client shall be found here.
        """
        self._belongs = belongs
        self._heap: list[tuple[float, int, _Client]] = []
        self._listed: set[_Client] = set()
        self._made = 0  # entries so far

    def add(self, client: _Client, most: int) -> None:
        """List a client, once. most: clients that may belong here, so that entries out of date do not pile up."""
        if client in self._listed:
            return
        self._listed.add(client)
        heapq.heappush(self._heap, self._entry(client))
        if len(self._heap) > 2 * most + SPARE:
            self._heap = [entry for entry in self._heap if self._belongs(entry[2])]
            self._listed = {entry[2] for entry in self._heap}
            heapq.heapify(self._heap)

    def first(self) -> _Client | None:
        """Return the client with the smallest account, None if there is none."""
        while self._heap:
            used, _, client = self._heap[0]
            if not self._belongs(client):
                heapq.heappop(self._heap)
                self._listed.remove(client)
            elif used < client.used:
                heapq.heapreplace(self._heap, self._entry(client))
            else:
                return client
        return None

    def _entry(self, client: _Client) -> tuple[float, int, _Client]:
        self._made += 1
        return client.used, self._made, client


class WaitingQueue:
    """Texts that wait, fairly by client and in order of arrival within a client.

    No call takes longer because more texts wait; with the number of clients that wait, time grows by its logarithm. Not
    safe to call from several threads at once.
    """

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}  # those with a text that waits or runs
        self._left: OrderedDict[str, float] = OrderedDict()  # accounts of others, the latest to leave last
        self._without_place = _ByAccount(lambda client: bool(client.waiting) and not client.running)
        self._with_place = _ByAccount(lambda client: bool(client.waiting) and client.running > 0)
        self._fair = 0.0  # the fair account
        self._count = self._waiting_clients = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, sequence: TokenSequence) -> bool:
        client = self._clients.get(sequence.client)
        return client is not None and sequence in client.waiting

    @property
    def clients(self) -> int:
        """Clients with a text that waits."""
        return self._waiting_clients

    def waiting(self, client: str) -> int:
        """Count the texts of a client that wait."""
        found = self._clients.get(client)
        return 0 if found is None else len(found.waiting)

    def running(self, client: str) -> int:
        """Count the places that a client holds."""
        found = self._clients.get(client)
        return 0 if found is None else found.running

    def add(self, sequence: TokenSequence) -> None:
        """Let a new text wait behind the others of its client."""
        client = self._clients.get(sequence.client)
        if client is None:
            client = self._clients[sequence.client] = _Client(sequence.client, self._left.pop(sequence.client, 0))
        if not client.waiting:
            client.used = max(client.used, self._fair)
        self._wait(client, sequence)

    def put_back(self, sequence: TokenSequence) -> None:
        """Let a text that had a place wait again, before the others of its client."""
        client = self._clients[sequence.client]
        client.running -= 1
        self._wait(client, sequence)
        client.waiting.move_to_end(sequence, last=False)

    def remove(self, sequence: TokenSequence) -> None:
        """Take out a text that shall not be begun."""
        client = self._clients[sequence.client]
        self._take_out(client, sequence)
        self._forget(client)

    def clear(self) -> list[TokenSequence]:
        """Take out all texts that wait. Returns them."""
        sequences = [sequence for client in self._clients.values() for sequence in client.waiting]
        for sequence in sequences:
            self.remove(sequence)
        return sequences

    def first(self) -> TokenSequence | None:
        """Return the text whose turn it is, without taking it out; None if none waits."""
        client = self._without_place.first() or self._with_place.first()
        return None if client is None else next(iter(client.waiting))

    def start(self, sequence: TokenSequence) -> None:
        """Take out a text to give it a place."""
        client = self._clients[sequence.client]
        heads = (self._without_place.first(), self._with_place.first())
        self._fair = max(self._fair, min(head.used for head in heads if head is not None))
        client.running += 1
        self._take_out(client, sequence)
        self._list(client)

    def charge(self, sequence: TokenSequence, tokens: int) -> None:
        """Put tokens that were read or written for a text with a place on its client's account."""
        self._clients[sequence.client].used += tokens
        self._fair += tokens / len(self._clients)

    def end(self, sequence: TokenSequence) -> None:
        """Take back the place of a text that has ended."""
        client = self._clients[sequence.client]
        client.running -= 1
        self._list(client)
        self._forget(client)

    def _wait(self, client: _Client, sequence: TokenSequence) -> None:
        self._waiting_clients += not client.waiting
        self._count += 1
        client.waiting[sequence] = None
        self._list(client)

    def _take_out(self, client: _Client, sequence: TokenSequence) -> None:
        del client.waiting[sequence]
        self._count -= 1
        self._waiting_clients -= not client.waiting

    def _list(self, client: _Client) -> None:
        if client.waiting:
            (self._with_place if client.running else self._without_place).add(client, self._waiting_clients)

    def _forget(self, client: _Client) -> None:
        """Drop a client that has no text left; remember its account where it would not start as high anyway."""
        if client.waiting or client.running:
            return
        del self._clients[client.name]
        if client.used > self._fair:
            self._left[client.name] = client.used
            if len(self._left) > REMEMBERED:
                self._left.popitem(last=False)
