"""The thread in which the engine works, and how an asyncio server listens to it."""

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

PENDING = 1 << 14  # tokens of one request that may wait to be taken; each of a token's alternatives counts as one more
BEHIND = 10.0  # seconds for which more than that may wait: a fast engine writes them before a reader has turned round
PATIENCE = 10.0  # seconds that `stop` waits for the round that is under way

_Item = tuple[int, SequenceDelta]


class Stopped(Exception):
    """The server takes nothing new any more, or was stopped before the text ended."""


class SlowConsumerError(ReDrafterError):
    """Whoever asked for texts did not take what was written, so the rest was cancelled."""


class _Stream:
    """What was written for one request and not taken yet.

    One thread writes, one loop reads. Each counts for itself, so that neither waits for the other.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self.sequences: list[TokenSequence] = []
        self.error: Exception | None = None
        self.called = False  # the loop was told that there is something, and has not looked since
        self._items: deque[_Item] = deque()
        self._ready = asyncio.Event()
        self._written = self._taken = 0
        self._since = 0.0  # when the oldest delta was written that nobody has taken

    @property
    def pending(self) -> int:
        """Tokens, alternatives counted, that were written and not taken."""
        return self._written - self._taken

    @property
    def abandoned(self) -> bool:
        """Whether too much waits to be taken, and has waited for too long."""
        return self.error is None and self.pending > PENDING and time.monotonic() - self._since > BEHIND

    def write(self, number: int, delta: SequenceDelta) -> None:
        """Add a delta, in the engine's thread; none after an error."""
        if self.error is None:
            if not self._items:
                self._since = time.monotonic()
            self._items.append((number, delta))
            self._written += _weight(delta)

    def fail(self, error: Exception) -> None:
        """Have the reader get an error instead of what it has not taken. The first one counts."""
        if self.error is None:
            self.error = error
            self._items.clear()

    def wake(self) -> None:
        """Tell the reader to look, in its loop."""
        self._ready.set()

    async def take(self) -> list[_Item]:
        """Wait for deltas, and take all there are. Raises what the stream failed with."""
        await self._ready.wait()
        self._ready.clear()
        self.called = False  # before looking: what comes later calls again
        items = []
        with suppress(IndexError):  # it became empty
            while True:
                items.append(self._items.popleft())
        self._taken += sum(_weight(delta) for _, delta in items)
        if self.error is not None:
            raise self.error
        return items


class Worker:
    """Runs the rounds of a scheduler, in a thread of its own, as long as there is work."""

    def __init__(
        self,
        scheduler: Scheduler,
        told: Callable[[TokenSequence, SequenceDelta], object] = lambda sequence, delta: None,
    ):
        """Args:
        scheduler: What serves; nobody else may call its rounds.
        told: Called with every delta, in the engine's thread.
        """
        self.scheduler, self._told = scheduler, told
        self._work = threading.Event()
        self._streams: set[_Stream] = set()  # that somebody listens to
        self._called: list[_Stream] = []  # whose loops are to be told that there is something
        self._draining = self._stopping = False
        self._deadline: float | None = None
        self._thread = threading.Thread(target=self._run, name="redrafter-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests are served."""
        return self._thread.is_alive() and not self._draining

    def drain(self, seconds: float | None = None) -> None:
        """Take nothing new; what was taken goes on.

        Args:
            seconds: After which what is left is cancelled: each text ends with finish "cancelled". None: never.
        """
        if seconds is not None:
            self._deadline = time.monotonic() + seconds
        self._draining = True

    def stop(self) -> None:
        """Cancel what is left and end. Returns after the round under way, whether or not anybody still listens."""
        self._draining = self._stopping = True
        self._work.set()
        if self._thread.is_alive():
            self._thread.join(timeout=PATIENCE)
        self._fail_all()

    async def deltas(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        params: SamplingParams,
        stops: Callable[[], Callable | None],
        client: str = "",
        cache_salt: str | None = None,
    ) -> AsyncIterator[tuple[int, TokenSequence, list[SequenceDelta]]]:
        """Serve some prompts, prompt i under seed + i.

        Whoever is slower than the engine gets more at once; whoever takes nothing for `BEHIND` seconds while `PENDING`
        tokens wait is dropped. Whoever leaves this iterator early cancels the rest.

        Args:
            prompts: Token ids.
            max_new_tokens: The most tokens that may follow each.
            params: How tokens are drawn.
            stops: Makes what watches one text.
            client: Who asks, as far as fairness goes.
            cache_salt: Beginnings of texts are reused only from requests with the same one.

        Yields:
            The number of a prompt, its sequence, and the deltas since it was yielded last, until all have ended.

        Raises:
            Stopped: The server takes nothing new, or was stopped meanwhile.
            SlowConsumerError: What was written was not taken.
            QueueFullError, ArgumentError: As `Scheduler.submit` does, before the first delta.
        """
        stream = _Stream(asyncio.get_running_loop())
        self._streams.add(stream)
        try:
            if not self.alive:
                raise Stopped
            for number, prompt in enumerate(prompts):
                own = replace(params, seed=params.seed + number)
                stream.sequences.append(
                    TokenSequence(prompt, max_new_tokens, own, self._sink(stream, number), stops(), client, cache_salt)
                )
            self.scheduler.submit(*stream.sequences)
            if self._stopping:  # it may have come too late for anybody to see
                raise Stopped
            self._work.set()
            left = len(stream.sequences)
            while left:
                found: defaultdict[int, list[SequenceDelta]] = defaultdict(list)
                for number, delta in await stream.take():
                    found[number].append(delta)
                    left -= delta.finish is not None
                for number, each in found.items():
                    yield number, stream.sequences[number], each
        finally:
            self._streams.discard(stream)
            self.scheduler.cancel(*stream.sequences)  # to those that have ended, that does nothing
            self._work.set()

    def _sink(self, stream: _Stream, number: int) -> Callable[[TokenSequence, SequenceDelta], None]:
        def tell(sequence: TokenSequence, delta: SequenceDelta) -> None:
            self._told(sequence, delta)
            stream.write(number, delta)
            if stream.abandoned:
                stream.fail(SlowConsumerError(f"{stream.pending} tokens were written that nobody took: cancelled"))
                self.scheduler.cancel(*stream.sequences)
            if not stream.called:
                stream.called = True
                self._called.append(stream)

        return tell

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
        finally:  # nobody may wait for a thread that is gone
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
        """Wake up whoever has something to take, in one call for each loop: each call costs the engine."""
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[_Stream]] = defaultdict(list)
        for stream in self._called:
            by_loop[stream.loop].append(stream)
        self._called.clear()
        for loop, streams in by_loop.items():
            with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(_wake, streams)

    def _fail_all(self) -> None:
        """Tell everybody who still listens that nothing more will come."""
        for stream in tuple(self._streams):
            if not all(sequence.ended for sequence in stream.sequences):
                stream.fail(Stopped())
                with suppress(RuntimeError):
                    stream.loop.call_soon_threadsafe(stream.wake)


def _wake(streams: Sequence[_Stream]) -> None:
    for stream in streams:
        stream.wake()


def _weight(delta: SequenceDelta) -> int:
    """Count what a delta holds: its tokens, and the likeliest ones that are told beside them."""
    return len(delta.tokens) + sum(len(likeliest) for _, likeliest in delta.logprobs or ())
