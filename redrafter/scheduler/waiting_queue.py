"""The waiting queue: which waiting sequence is admitted next, by priority, and so that no client starves another.

Sequences with a lower priority number come before all with a higher one, which may wait for as long as there are any.
Within a priority, each client has a queue of its own, in the order in which its sequences arrived, and an account of
the tokens that the server has worked for it: prompt tokens that were read, and new tokens that were drawn. A free slot
goes

1. to a client that holds no slot, if one waits, so that every client advances however many sequences others submit;
2. else to the client with the smallest account, so that clients that ask for more than there is get equally many
   tokens each, whether they submit 500 sequences or 5, and whether those are short or long.

The second is the virtual token counter of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024); like
fair queueing in routers, but without a guess of how long a sequence will become, since tokens are counted when they are
drawn. It also decides between several clients without a slot.

A client that arrives or returns has no claim to unused capacity: its account starts at the fair account, the account
of a client that always requested more than it received. The fair account grows with each token by the share of one
client. So it overtakes every account in time, and no number of new clients can keep an older one from its turn. A
client's usage above the fair account is remembered for a while after it leaves.

`Limits` sets how many may wait and run at all.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from redrafter.errors import ReDrafterError

if TYPE_CHECKING:  # limits are parsed before torch is imported
    from redrafter.scheduler.sequence import TokenSequence

MAX_REMEMBERED_CLIENTS = 4096  # clients without any sequence whose accounts are kept
SPARE_HEAP_ENTRIES = 64  # entries of a heap that may be out of date, in addition to one for each waiting client


class QueueFullError(ReDrafterError):
    """Too many sequences wait to accept another."""


@dataclass(frozen=True)
class Limits:
    """Says how many sequences and tokens run and wait at once.

    Attributes:
        max_batch_size: Sequences that hold a slot, whether they step or their prompts are being read.
        max_num_tokens: Tokens of one forward, drafts and chunks of prompts together.
        max_seq_len: Tokens of a sequence, prompt included; None for the context length of the model.
        max_queue_size: Sequences that wait for a slot, 0 for any number, as `WaitingQueue.refuse_if_full` applies it.
        guaranteed_no_evict: Admit a sequence only when there are blocks for its greatest length, so that none is ever
            preempted.
        chunked: Read long prompts in chunks.
        paced: Let a forward over prompts alone take about `prefill.TARGET_SECONDS` at most, so that running
            sequences do not wait for longer. Without a pace, it reads all prompts that were admitted.
        reuse: Look for prefixes that are in the cache already.
        admit_together: Slots that must be free before sequences are admitted while others run, if as many wait
            and prompts have forwards of their own: one over several prompts takes little longer than over one.
        bulk: Whether only the time of all sequences together counts, so that many rows are exchanged in groups: see
            `RunningBatch.remove` and `Prefiller.choose_mixed`.
    """

    max_batch_size: int = 32
    max_num_tokens: int = 8192
    max_seq_len: int | None = None
    max_queue_size: int = 4096
    guaranteed_no_evict: bool = False
    chunked: bool = True
    paced: bool = True
    reuse: bool = True
    admit_together: int = 1
    bulk: bool = False


@dataclass(eq=False)
class _Client:
    """The account and the sequences of one client.

    Attributes:
        name: Name of the client.
        used: Its account: tokens that were read and drawn for it.
        waiting: Its waiting sequences, the next one first. A dict, so that any of them is removed at once.
        running: How many slots its sequences hold.
    """

    name: str
    used: float
    waiting: OrderedDict[TokenSequence, None] = field(default_factory=OrderedDict)
    running: int = 0


class _AccountHeap:
    """A heap of clients, the one with the smallest account first.

    Accounts only grow, so a stale entry is too early in the heap: it is updated, or dropped, when it comes
    first. Among equal accounts, the client whose entry is the oldest comes first.
    """

    def __init__(self, belongs: Callable[[_Client], bool]):
        """Make an empty heap. belongs: returns whether a client belongs in it."""
        self._belongs = belongs
        self._heap: list[tuple[float, int, _Client]] = []
        self._listed: set[_Client] = set()
        self._entries_made = 0

    def __len__(self) -> int:
        assert len(self._heap) == len(self._listed)
        return len(self._heap)

    def add(self, client: _Client, clients: int) -> None:
        """Add a client unless it is there, and drop outdated entries once there are many.

        Args:
            client: The client.
            clients: How many clients may belong here now.
        """
        if client in self._listed:
            return
        self._listed.add(client)
        heapq.heappush(self._heap, self._entry(client))
        # Stale entries are dropped in bulk, so that their number stays within a factor of the waiting clients.
        if len(self._heap) > 2 * clients + SPARE_HEAP_ENTRIES:
            self._heap = [entry for entry in self._heap if self._belongs(entry[2])]
            self._listed = {entry[2] for entry in self._heap}
            heapq.heapify(self._heap)

    def first(self) -> _Client | None:
        """Return the client with the smallest account, or None if there is none."""
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
        self._entries_made += 1
        return client.used, self._entries_made, client


class FairQueue:
    """Waiting sequences of one priority, fairly by client and in order of arrival within a client.

    No call takes longer because more sequences wait; its time grows with the logarithm of the number of waiting
    clients. Not safe to call from several threads at once.
    """

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}  # those with a sequence that waits or holds a slot
        self._remembered: OrderedDict[str, float] = OrderedDict()  # accounts of others, the latest to leave last
        self._without_slot = _AccountHeap(lambda client: bool(client.waiting) and not client.running)
        self._with_slot = _AccountHeap(lambda client: bool(client.waiting) and client.running > 0)
        self._fair_account = 0.0
        self._count = self._waiting_clients = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, sequence: TokenSequence) -> bool:
        client = self._clients.get(sequence.client)
        return client is not None and sequence in client.waiting

    @property
    def clients(self) -> int:
        """Number of clients with a sequence that waits or holds a slot."""
        return len(self._clients)

    @property
    def names(self) -> Iterable[str]:
        """Names of these clients."""
        return self._clients

    @property
    def sequences(self) -> list[TokenSequence]:
        """All waiting sequences, client by client."""
        return [sequence for client in self._clients.values() for sequence in client.waiting]

    @property
    def remembered_clients(self) -> int:
        """Number of clients without any sequence whose accounts are kept."""
        return len(self._remembered)

    @property
    def heap_sizes(self) -> tuple[int, int]:
        """Numbers of heap entries, outdated ones included, for clients without and with a slot."""
        return len(self._without_slot), len(self._with_slot)

    def running(self, name: str) -> int:
        """Count the slots that a client holds."""
        client = self._clients.get(name)
        return 0 if client is None else client.running

    def add(self, sequence: TokenSequence) -> None:
        """Append a new sequence to the queue of its client."""
        client = self._clients.get(sequence.client)
        if client is None:
            used = self._remembered.pop(sequence.client, 0)
            client = self._clients[sequence.client] = _Client(sequence.client, used)
        if not client.waiting:
            # A returning client would otherwise have a small account, and be served alone until it has caught up.
            client.used = max(client.used, self._fair_account)
        self._insert(client, sequence)

    def put_back(self, sequence: TokenSequence) -> None:
        """Add a sequence that had a slot before the others of its client."""
        client = self._clients[sequence.client]
        client.running -= 1
        self._insert(client, sequence)
        # It has tokens already, and its blocks may still be cached, so it comes before the client's other sequences.
        client.waiting.move_to_end(sequence, last=False)

    def remove(self, sequence: TokenSequence) -> None:
        """Remove a sequence that shall not be admitted."""
        client = self._clients[sequence.client]
        self._take_out(client, sequence)
        self._forget_if_gone(client)

    def first(self) -> TokenSequence | None:
        """Return the sequence that is to be admitted next, without removing it, or None if none waits."""
        client = self._without_slot.first() or self._with_slot.first()
        return None if client is None else next(iter(client.waiting))

    def start(self, sequence: TokenSequence) -> None:
        """Remove a sequence in order to give it a slot."""
        client = self._clients[sequence.client]
        heads = (self._without_slot.first(), self._with_slot.first())
        # The smallest waiting account bounds the fair one from below, or newcomers would overtake all who wait.
        self._fair_account = max(self._fair_account, min(head.used for head in heads if head is not None))
        client.running += 1
        self._take_out(client, sequence)
        self._list(client)

    def charge(self, sequence: TokenSequence, tokens: int) -> None:
        """Add tokens that were read or drawn for a sequence with a slot to its client's account."""
        self._clients[sequence.client].used += tokens
        self._fair_account += tokens / len(self._clients)

    def end(self, sequence: TokenSequence) -> None:
        """Take back the slot of a sequence that has ended."""
        client = self._clients[sequence.client]
        client.running -= 1
        self._list(client)
        self._forget_if_gone(client)

    def _insert(self, client: _Client, sequence: TokenSequence) -> None:
        self._waiting_clients += not client.waiting
        self._count += 1
        client.waiting[sequence] = None
        self._list(client)

    def _take_out(self, client: _Client, sequence: TokenSequence) -> None:
        del client.waiting[sequence]
        self._count -= 1
        self._waiting_clients -= not client.waiting

    def _list(self, client: _Client) -> None:
        """Add a client that waits to the heap of its kind: with or without a slot."""
        if client.waiting:
            (self._with_slot if client.running else self._without_slot).add(client, self._waiting_clients)

    def _forget_if_gone(self, client: _Client) -> None:
        """Drop a client that has no sequence left, but remember an account above the fair account."""
        if client.waiting or client.running:
            return
        del self._clients[client.name]
        if client.used > self._fair_account:
            self._remembered[client.name] = client.used
            if len(self._remembered) > MAX_REMEMBERED_CLIENTS:
                self._remembered.popitem(last=False)


class WaitingQueue:
    """Waiting sequences by priority, lowest number first: a `FairQueue` for each priority.

    Its calls take as long as those of a `FairQueue`, and grow with the logarithm of the number of priorities. Not safe
    to call from several threads at once.
    """

    def __init__(self) -> None:
        self._queues: dict[int, FairQueue] = {0: FairQueue()}  # by priority; idle ones too, which keep their accounts
        self._heap: list[int] = []  # of priorities, the first one first: all that have waiting sequences, and others
        self._listed: set[int] = set()  # those in the heap
        self._spare = SPARE_HEAP_ENTRIES  # number of queues from which on idle ones are dropped
        self._waiting = Counter[str]()  # numbers of waiting sequences, by client
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, sequence: TokenSequence) -> bool:
        queue = self._queues.get(sequence.priority)
        return queue is not None and sequence in queue

    @property
    def clients(self) -> int:
        """Number of clients with a sequence that waits or holds a slot."""
        return len({name for queue in self._queues.values() for name in queue.names})

    @property
    def priorities(self) -> int:
        """Number of priorities that are remembered, those without any sequence included."""
        return len(self._queues)

    @property
    def waiting_clients(self) -> int:
        """Number of clients with a sequence that waits."""
        return len(self._waiting)

    def waiting(self, name: str) -> int:
        """Count the waiting sequences of a client, of any priority."""
        return self._waiting[name]

    def running(self, sequence: TokenSequence) -> int:
        """Count the slots that a sequence's client holds with sequences of the same priority."""
        return self._queues[sequence.priority].running(sequence.client)

    def refuse_if_full(self, limits: Limits, running: int, client: str, count: int) -> None:
        """Raise `QueueFullError` if the queue has no room for this number of further sequences of a client.

        Only sequences count that cannot begin at once for want of a slot. A client alone may use all of
        `max_queue_size`. When that is used up, other clients may wait too, up to as many sequences again: each up
        to its share, which is `max_queue_size` divided by the number of clients that wait. What comes while nobody
        waits is always accepted, so that a request of more than `max_queue_size` sequences is served too. Priorities
        make no difference, since the bound is one of memory.
        """
        most = limits.max_queue_size
        if not most or not self:
            return
        # Sequences that get a free slot at once do not wait.
        waiting = len(self) + count - max(limits.max_batch_size - running, 0)
        of_client = self.waiting(client)
        share = most // (self.waiting_clients + (not of_client))
        if waiting > most and (waiting > 2 * most or of_client + count > share):
            raise QueueFullError(
                f"{len(self)} sequences are waiting, {of_client} of them yours, and {count} more would be too many: "
                f"max_queue_size is {most}; try again later"
            )

    def add(self, sequence: TokenSequence) -> None:
        """Add a new sequence after the others of its client and priority."""
        if sequence.priority not in self._queues:
            if len(self._queues) >= self._spare:
                self._drop_idle()
            self._queues[sequence.priority] = FairQueue()
        self._queues[sequence.priority].add(sequence)
        self._count_in(sequence)

    def put_back(self, sequence: TokenSequence) -> None:
        """Add a sequence that had a slot before the others of its client and priority."""
        self._queues[sequence.priority].put_back(sequence)
        self._count_in(sequence)

    def remove(self, sequence: TokenSequence) -> None:
        """Remove a sequence that shall not be admitted."""
        self._queues[sequence.priority].remove(sequence)
        self._count_out(sequence)

    def clear(self) -> list[TokenSequence]:
        """Remove all waiting sequences, and return them."""
        sequences = [sequence for queue in self._queues.values() for sequence in queue.sequences]
        for sequence in sequences:
            self.remove(sequence)
        return sequences

    def first(self) -> TokenSequence | None:
        """Return the sequence that is to be admitted next, without removing it, or None if none waits."""
        while self._heap:
            if (sequence := self._queues[self._heap[0]].first()) is not None:
                return sequence
            # Removed lazily: a priority's queue may have become empty by cancellation.
            self._listed.remove(heapq.heappop(self._heap))
        return None

    def start(self, sequence: TokenSequence) -> None:
        """Remove a sequence in order to give it a slot."""
        self._queues[sequence.priority].start(sequence)
        self._count_out(sequence)

    def charge(self, sequence: TokenSequence, tokens: int) -> None:
        """Add tokens that were read or drawn for a sequence with a slot to its client's account of its priority."""
        self._queues[sequence.priority].charge(sequence, tokens)

    def end(self, sequence: TokenSequence) -> None:
        """Take back the slot of a sequence that has ended."""
        self._queues[sequence.priority].end(sequence)

    def _count_in(self, sequence: TokenSequence) -> None:
        self._count += 1
        self._waiting[sequence.client] += 1
        if sequence.priority not in self._listed:
            self._listed.add(sequence.priority)
            heapq.heappush(self._heap, sequence.priority)

    def _count_out(self, sequence: TokenSequence) -> None:
        self._count -= 1
        self._waiting[sequence.client] -= 1
        if not self._waiting[sequence.client]:
            del self._waiting[sequence.client]

    def _drop_idle(self) -> None:
        """Drop empty queues and their accounts, except the queue of priority 0, which most requests use."""
        self._queues = {number: queue for number, queue in self._queues.items() if queue.clients or number == 0}
        self._listed = {number for number, queue in self._queues.items() if queue}
        self._heap = sorted(self._listed)
        # The bound grows with what is in use, so that dropping costs amortised constant time.
        self._spare = 2 * len(self._queues) + SPARE_HEAP_ENTRIES
