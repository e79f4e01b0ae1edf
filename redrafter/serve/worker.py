"""The thread that runs the scheduler, and the streams by which an asyncio server receives its deltas."""

import asyncio
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from redrafter.errors import ReDrafterError
from redrafter.scheduler.scheduler import Scheduler
from redrafter.scheduler.sequence import SamplingParams, SequenceDelta, TokenSequence

__all__ = ["SlowConsumerError", "Stopped", "Worker"]

_LOG = logging.getLogger(__name__)

# Tokens of one request that may wait to be received; each of a token's alternatives counts as one more.
MAX_PENDING_TOKENS = 1 << 14
MAX_BEHIND_SECONDS = 10.0  # seconds for which more may wait: a fast engine draws them before a reader is back
STOP_SECONDS = 10.0  # seconds for which `stop` waits for the current round

_Item = tuple[int, SequenceDelta]


class Stopped(Exception):
    """The server accepts nothing new any more, or was stopped before the sequences ended."""


class SlowConsumerError(ReDrafterError):
    """The client did not receive its tokens in time, so the rest of the request was cancelled."""


class _Stream:
    """Deltas of one request that were written by the engine's thread and not received yet by an event loop.

    Each side counts tokens for itself, so that neither waits for the other.

    Attributes:
        loop: The event loop that receives.
        sequences: Sequences of the request.
        error: What the receiver gets instead of more deltas; None while all is well.
        woken: Whether the loop was told to look, and has not looked since.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self.sequences: list[TokenSequence] = []
        self.error: Exception | None = None
        self.woken = False
        self._items: deque[_Item] = deque()
        self._ready = asyncio.Event()
        self._written = self._received = 0
        self._oldest_at = 0.0  # when the oldest delta was written that was not received yet

    @property
    def pending(self) -> int:
        """Number of tokens and their alternatives that were written and not received."""
        return self._written - self._received

    @property
    def abandoned(self) -> bool:
        """Whether too many tokens have waited for too long to be received."""
        return (
            self.error is None
            and self.pending > MAX_PENDING_TOKENS
            and time.monotonic() - self._oldest_at > MAX_BEHIND_SECONDS
        )

    def write(self, number: int, delta: SequenceDelta) -> None:
        """Add a delta of sequence `number`, in the engine's thread. After an error, do nothing."""
        if self.error is None:
            if not self._items:
                self._oldest_at = time.monotonic()
            self._items.append((number, delta))
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


class Worker:
    """Runs the rounds of a scheduler in a thread of its own, as long as there is work."""

    def __init__(
        self,
        scheduler: Scheduler,
        on_delta: Callable[[TokenSequence, SequenceDelta], object] = lambda sequence, delta: None,
    ):
        """Make a worker that has not started.

        Args:
            scheduler: The scheduler; nobody else may run its rounds.
            on_delta: Called with every delta, in the engine's thread.
        """
        self.scheduler, self._on_delta = scheduler, on_delta
        self._work = threading.Event()
        self._streams: set[_Stream] = set()  # those that somebody receives from
        self._to_wake: list[_Stream] = []  # streams with deltas of which their loops do not know yet
        self._draining = self._stopping = False
        self._deadline: float | None = None
        self._thread = threading.Thread(target=self._run, name="redrafter-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether new requests are accepted."""
        return self._thread.is_alive() and not self._draining

    @property
    def streams(self) -> int:
        """Number of requests whose deltas somebody receives."""
        return len(self._streams)

    def drain(self, seconds: float | None = None) -> None:
        """Accept nothing new; requests that were accepted go on.

        Args:
            seconds: Seconds after which the sequences that are left end with finish "cancelled"; None for never.
        """
        if seconds is not None:
            self._deadline = time.monotonic() + seconds
        self._draining = True

    def stop(self) -> None:
        """Cancel all sequences, and wait for the current round to end, whether or not anybody still receives."""
        self._draining = self._stopping = True
        self._work.set()
        if self._thread.is_alive():
            self._thread.join(timeout=STOP_SECONDS)
        self._fail_all()

    async def deltas(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        params: SamplingParams,
        make_find_stop: Callable[[], Callable[[Sequence[int]], int | None] | None],
        client: str = "",
        cache_salt: str | None = None,
    ) -> AsyncIterator[tuple[int, TokenSequence, list[SequenceDelta]]]:
        """Serve the prompts of one request, prompt i with seed + i, and yield their deltas.

        A consumer that is slower than the engine gets more at once. One that receives nothing for `MAX_BEHIND_SECONDS`
        while `MAX_PENDING_TOKENS` tokens wait is dropped. Closing this iterator early cancels the rest.

        Args:
            prompts: Token ids of each prompt.
            max_new_tokens: Most tokens that may follow each.
            params: How tokens are drawn.
            make_find_stop: Makes the `find_stop` of one sequence, or None.
            client: Who asks, as far as fairness goes.
            cache_salt: Prefixes are reused only from requests with the same salt.

        Yields:
            The index of a prompt, its sequence, and its deltas since it was yielded last, until all have ended.

        Raises:
            Stopped: The server accepts nothing new, or was stopped meanwhile.
            SlowConsumerError: The deltas were not received in time.
            QueueFullError: Too many sequences wait.
            ArgumentError: One of the prompts can never be served.
        """
        stream = _Stream(asyncio.get_running_loop())
        self._streams.add(stream)
        try:
            if not self.alive:
                raise Stopped
            for number, prompt in enumerate(prompts):
                seeded = replace(params, seed=params.seed + number)
                sink, find_stop = self._sink(stream, number), make_find_stop()
                stream.sequences.append(
                    TokenSequence(prompt, max_new_tokens, seeded, sink, find_stop, client, cache_salt)
                )
            self.scheduler.submit(*stream.sequences)
            if self._stopping:  # the thread may have ended before it could see the request
                raise Stopped
            self._work.set()
            left = len(stream.sequences)
            while left:
                deltas: defaultdict[int, list[SequenceDelta]] = defaultdict(list)
                for number, delta in await stream.receive():
                    deltas[number].append(delta)
                    left -= delta.finish is not None
                for number, new in deltas.items():
                    yield number, stream.sequences[number], new
        finally:
            self._streams.discard(stream)
            self.scheduler.cancel(*stream.sequences)  # those that have ended are left alone
            self._work.set()

    def _sink(self, stream: _Stream, number: int) -> Callable[[TokenSequence, SequenceDelta], None]:
        def write(sequence: TokenSequence, delta: SequenceDelta) -> None:
            self._on_delta(sequence, delta)
            stream.write(number, delta)
            if stream.abandoned:
                stream.fail(SlowConsumerError(f"{stream.pending} tokens were written that nobody took: cancelled"))
                self.scheduler.cancel(*stream.sequences)
            if not stream.woken:
                stream.woken = True
                self._to_wake.append(stream)

        return write

    def _run(self) -> None:
        try:
            while not self._stopping:
                if self.scheduler.idle:
                    self._work.wait()
                    self._work.clear()
                else:
                    self._round()
            while not self.scheduler.idle:
                self.scheduler.cancel_all()
                self.scheduler.read()
        except Exception:
            _LOG.exception("the engine failed: nothing is served any more")
        finally:  # no consumer may wait for a thread that is gone
            self._deliver()
            self._draining = self._stopping = True
            self._fail_all()

    def _round(self) -> None:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self.scheduler.cancel_all()
        self.scheduler.read()
        self._deliver()  # a first token does not wait for the step
        self.scheduler.step()
        self._deliver()

    def _deliver(self) -> None:
        """Wake the receivers of new deltas, in one call for each loop, since each call costs the engine time."""
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[_Stream]] = defaultdict(list)
        for stream in self._to_wake:
            by_loop[stream.loop].append(stream)
        self._to_wake.clear()
        for loop, streams in by_loop.items():
            with suppress(RuntimeError):  # the loop is closed: nobody receives any more
                loop.call_soon_threadsafe(_wake, streams)

    def _fail_all(self) -> None:
        """Let everybody who still receives get `Stopped`."""
        for stream in tuple(self._streams):
            if not all(sequence.ended for sequence in stream.sequences):
                stream.fail(Stopped())
                with suppress(RuntimeError):
                    stream.loop.call_soon_threadsafe(stream.wake)


def _wake(streams: Sequence[_Stream]) -> None:
    for stream in streams:
        stream.wake()


def _weight(delta: SequenceDelta) -> int:
    """Count the tokens of a delta, and the likeliest ones that are reported beside them."""
    return len(delta.tokens) + sum(len(likeliest) for _, likeliest in delta.logprobs or ())
