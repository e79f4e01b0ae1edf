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

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from redrafter.errors import ReDrafterError

if TYPE_CHECKING:  # limits are parsed before torch is imported
    from redrafter.scheduler.sequence import Account, TokenSequence

MAX_REMEMBERED_ACCOUNTS = 4096  # accounts without any sequence that are kept
SPARE_LEVELS = 64  # idle priorities that are kept, in addition to two for each account with a sequence


class QueueFullError(ReDrafterError):
    """Too many sequences wait to accept another."""


@dataclass(frozen=True)
class Limits:
    """Says how many sequences and tokens run and wait at once.

    Attributes:
        max_batch_size: Sequences that hold a slot, whether they step or their prompts are being read.
        max_num_tokens: Tokens of one forward, drafts and chunks of prompts together.
        max_seq_len: Tokens of a sequence, prompt included; None for the context length of the model.
        max_input_len: Tokens of a prompt; None for as many as leave room for one more.
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
    max_input_len: int | None = None
    max_queue_size: int = 4096
    guaranteed_no_evict: bool = False
    chunked: bool = True
    paced: bool = True
    reuse: bool = True
    admit_together: int = 1
    bulk: bool = False


@dataclass(eq=False)
class _Account:
    """The sequences of one client and one priority, and the tokens that the server has worked for them.

    Attributes:
        priority: Lower numbers are served first.
        client: Name of the client.
        used: Tokens that were read or drawn, or what the account began with.
        waiting: Its waiting sequences, the next one first. A dict, so that any of them is removed at once.
        running: How many slots its sequences hold.
    """

    priority: int
    client: str
    used: float
    waiting: OrderedDict[TokenSequence, None] = field(default_factory=OrderedDict)
    running: int = 0


@dataclass
class _Level:
    """One priority: its fair account, and the number of accounts with a sequence that waits or holds a slot."""

    fair: float = 0.0
    accounts: int = 0


class WaitingQueue:
    """Waiting sequences by priority, then fairly by client, and in order of arrival within a client.

    No call takes longer because more sequences of a client wait; `first` looks at each client that waits. Not safe to
    call from several threads at once.
    """

    def __init__(self) -> None:
        self._accounts: dict[Account, _Account] = {}  # those with a sequence that waits or holds a slot
        self._levels: dict[int, _Level] = {}  # by priority; idle ones too, which keep their fair accounts
        self._remembered: OrderedDict[Account, float] = OrderedDict()  # of other accounts, the latest last
        self._waiting = Counter[str]()  # numbers of waiting sequences, by client
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, sequence: TokenSequence) -> bool:
        account = self._accounts.get(sequence.account)
        return account is not None and sequence in account.waiting

    @property
    def entries(self) -> int:
        """Number of entries that are kept of accounts and priorities."""
        return len(self._accounts) + len(self._levels) + len(self._remembered)

    def waiting(self, client: str) -> int:
        """Count the waiting sequences of a client, of any priority."""
        return self._waiting[client]

    def running(self, sequence: TokenSequence) -> int:
        """Count the slots that a sequence's client holds with sequences of the same priority."""
        account = self._accounts.get(sequence.account)
        return 0 if account is None else account.running

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
        share = most // (len(self._waiting) + (not of_client))
        if waiting > most and (waiting > 2 * most or of_client + count > share):
            raise QueueFullError(
                f"{len(self)} sequences are waiting, {of_client} of them yours, and {count} more would be too many: "
                f"max_queue_size is {most}; try again later"
            )

    def add(self, sequence: TokenSequence) -> None:
        """Add a new sequence after the others of its client and priority."""
        key, level = sequence.account, self._level(sequence.request.priority)
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = _Account(*key, self._remembered.pop(key, 0))
            level.accounts += 1
        if not account.waiting:
            # A returning client would otherwise have a small account, and be served alone until it has caught up.
            account.used = max(account.used, level.fair)
        self._insert(account, sequence)

    def put_back(self, sequence: TokenSequence) -> None:
        """Add a sequence that had a slot before the others of its client and priority."""
        account = self._accounts[sequence.account]
        account.running -= 1
        self._insert(account, sequence)
        # It has tokens already, and its blocks may still be cached, so it comes before the account's other sequences.
        account.waiting.move_to_end(sequence, last=False)

    def remove(self, sequence: TokenSequence) -> None:
        """Remove a sequence that shall not be admitted."""
        account = self._accounts[sequence.account]
        self._take_out(account, sequence)
        self._forget_if_gone(account)

    def clear(self) -> list[TokenSequence]:
        """Remove all waiting sequences, and return them."""
        sequences = [sequence for account in self._accounts.values() for sequence in account.waiting]
        for sequence in sequences:
            self.remove(sequence)
        return sequences

    def first(self) -> TokenSequence | None:
        """Return the sequence that is to be admitted next, without removing it, or None if none waits."""
        waiting = (account for account in self._accounts.values() if account.waiting)
        # Of one priority, clients without a slot come first.
        account = min(waiting, key=lambda each: (each.priority, each.running > 0, each.used), default=None)
        return None if account is None else next(iter(account.waiting))

    def start(self, sequence: TokenSequence) -> None:
        """Remove the first sequence in order to give it a slot."""
        account, level = self._accounts[sequence.account], self._levels[sequence.request.priority]
        priority = sequence.request.priority
        used = (each.used for each in self._accounts.values() if each.waiting and each.priority == priority)
        # The smallest waiting account bounds the fair one from below, or newcomers would overtake all who wait.
        level.fair = max(level.fair, min(used, default=0.0))
        account.running += 1
        self._take_out(account, sequence)

    def charge(self, account: Account, tokens: int) -> None:
        """Add tokens that were read or drawn for sequences with slots to their account."""
        level = self._levels[account[0]]
        self._accounts[account].used += tokens
        level.fair += tokens / level.accounts

    def end(self, sequence: TokenSequence) -> None:
        """Take back the slot of a sequence that has ended."""
        account = self._accounts[sequence.account]
        account.running -= 1
        self._forget_if_gone(account)

    def _level(self, priority: int) -> _Level:
        """Return a priority's level; idle ones, but that of 0, which most requests use, are dropped once many."""
        if priority not in self._levels:
            if len(self._levels) > 2 * len(self._accounts) + SPARE_LEVELS:
                self._levels = {number: level for number, level in self._levels.items() if level.accounts or not number}
            self._levels[priority] = _Level()
        return self._levels[priority]

    def _insert(self, account: _Account, sequence: TokenSequence) -> None:
        account.waiting[sequence] = None
        self._count += 1
        self._waiting[sequence.request.client] += 1

    def _take_out(self, account: _Account, sequence: TokenSequence) -> None:
        del account.waiting[sequence]
        self._count -= 1
        self._waiting[sequence.request.client] -= 1
        if not self._waiting[sequence.request.client]:
            del self._waiting[sequence.request.client]

    def _forget_if_gone(self, account: _Account) -> None:
        """Drop an account that has no sequence left, but remember one above the fair account."""
        if account.waiting or account.running:
            return
        key, level = (account.priority, account.client), self._levels[account.priority]
        del self._accounts[key]
        level.accounts -= 1
        if account.used > level.fair:
            self._remembered[key] = account.used
            if len(self._remembered) > MAX_REMEMBERED_ACCOUNTS:
                self._remembered.popitem(last=False)
