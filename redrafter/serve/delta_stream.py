"""The deltas of one request on their way from the thread that receives them to an event loop."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from redrafter.errors import ReDrafterError
from redrafter.scheduler.sequence import SequenceDelta
from redrafter.serve.served_sequence import ServedSequence

__all__ = ["DeltaStream", "SlowConsumerError", "Stopped"]

# Tokens of one request that may wait to be received; each of a token's alternatives counts as one more.
MAX_PENDING_TOKENS = 1 << 14
MAX_BEHIND_SECONDS = 10.0  # seconds for which more may wait: a fast engine draws them before a reader is back

_Item = tuple[int, SequenceDelta]


class Stopped(Exception):
    """The server accepts nothing new any more, or was stopped before the sequences ended."""

    def __init__(self, reason: str = "the server is stopping"):
        super().__init__(reason)


class SlowConsumerError(ReDrafterError):
    """The client did not receive its tokens in time, so the rest of the request was cancelled."""


class DeltaStream:
    """Deltas of one request that came from the engine and were not received yet by an event loop.

    Each side counts tokens for itself, so that neither waits for the other.

    Attributes:
        loop: The event loop that receives.
        numbers: Number of each sequence of the request.
        sequences: These sequences.
        error: What the receiver gets instead of more deltas; None while all is well.
        woken: Whether the loop was told to look, and has not looked since.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, numbers: Sequence[int], sequences: Sequence[ServedSequence]
    ) -> None:
        self.loop, self.numbers, self.sequences = loop, tuple(numbers), sequences
        self.error: Exception | None = None
        self.woken = False
        self._items: deque[_Item] = deque()
        self._ready = asyncio.Event()
        self._written = self._received = 0
        self._oldest_at = 0.0  # when the oldest delta came that was not received yet

    @property
    def pending(self) -> int:
        """Number of tokens and their alternatives that came and were not received."""
        return self._written - self._received

    @property
    def abandoned(self) -> bool:
        """Whether too many tokens have waited for too long to be received."""
        return (
            self.error is None
            and self.pending > MAX_PENDING_TOKENS
            and time.monotonic() - self._oldest_at > MAX_BEHIND_SECONDS
        )

    def write(self, index: int, delta: SequenceDelta) -> None:
        """Add a delta of a sequence, in the thread that receives them. After an error, do nothing.

        Args:
            index: The sequence's place in the request.
            delta: What it has gained.
        """
        if self.error is None:
            if not self._items:
                self._oldest_at = time.monotonic()
            self._items.append((index, delta))
            self._written += _weight(delta)

    def fail(self, error: Exception) -> None:
        """Let the receiver get an error instead of the deltas that wait. The first error counts."""
        if self.error is None:
            self.error = error
            self._items.clear()

    def wake(self) -> None:
        """Tell the receiver to look, from within its loop."""
        self._ready.set()

    async def receive(self) -> list[_Item]:
        """Wait for deltas and return all there are, or raise what the stream failed with."""
        await self._ready.wait()
        self._ready.clear()
        self.woken = False  # before looking: what comes later wakes again
        items = []
        with suppress(IndexError):  # it became empty
            while True:
                items.append(self._items.popleft())
        self._received += sum(_weight(delta) for _, delta in items)
        if self.error is not None:
            raise self.error
        return items


def _weight(delta: SequenceDelta) -> int:
    """Count the tokens of a delta, and the likeliest ones that are reported beside them."""
    return len(delta.tokens) + sum(len(likeliest) for _, likeliest in delta.logprobs or ())
