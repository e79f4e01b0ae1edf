"""Client of the engine's process: it submits requests and distributes the engine's deltas to streams."""

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TypeVar

from redrafter.errors import ReDrafterError
from redrafter.scheduler.logprobs import PromptScore
from redrafter.scheduler.sequence import SequenceDelta, Stats
from redrafter.serve.engine_process import messages
from redrafter.serve.engine_process.start import Channel, EngineFacts, EngineProcess

_LOG = logging.getLogger(__name__)

ASLEEP = "the server is asleep, and writes nothing: its operator wakes it with POST /v1/wake"
SILENT_SECONDS = 5.0  # without a message of an engine, which sends signs of life each second

Text = TypeVar("Text", bound="ServedSequence")
News = list[tuple[int, SequenceDelta]] | Exception  # new deltas with the index of their sequence in its request


class Stopped(Exception):
    """The server no longer accepts requests, or was stopped before the sequences ended."""

    def __init__(self, reason: str = "the server is stopping"):
        super().__init__(reason)


@dataclass(eq=False)
class ServedSequence:
    """The server's view of a sequence: its prompt and progress. The engine's `TokenSequence` is in the other process.

    The thread that receives deltas writes all of these fields; a subclass may add others.
    """

    prompt: Sequence[int]
    stop_token_ids: frozenset[int]
    stats: Stats  # counts of its steps; drawing the first token is not a step
    # Called with the tokens of each delta; returns the index of the token that completes a stop string, or None.
    find_stop: Callable[[Sequence[int]], int | None] | None = None
    adapter: str | None = None  # name of its LoRA adapter; None for the base model
    reused: int = 0  # number of leading prompt tokens found in the cache
    queued: float | None = None  # seconds it waited for a slot in the engine, once it has begun
    prompt_scores: Sequence[PromptScore] = ()  # scores of prompt tokens after the first, if requested, once it is read
    recorded: list[int] | None = None  # all generated tokens, if the sequence is captured
    written: int = 0  # number of generated tokens
    ended: bool = False  # whether the last delta has arrived
    arrived_at: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None  # by `time.perf_counter`

    def take(self, delta: SequenceDelta) -> SequenceDelta:
        """Count a delta of the engine, and return it, truncated at a stop string.

        The engine handles end tokens and length limits; stop strings need the text, so they are found here.
        """
        stop = None if self.find_stop is None else self.find_stop(delta.tokens)
        # The engine wrote past the stop string before it was found: cut tokens and counts alike.
        if stop is not None and delta.finish != "error":
            kept = stop + 1
            logprobs = None if delta.logprobs is None else delta.logprobs[:kept]
            accepted = min(delta.accepted, kept)
            copied = max(delta.copied - (delta.accepted - accepted), 0)  # copied drafts are at the end of a path
            cut = replace(delta, tokens=delta.tokens[:kept], accepted=accepted, copied=copied)
            delta = replace(cut, logprobs=logprobs, finish="stop")
        # The first token comes from the prompt, not from a step with drafts.
        if self.written and delta.tokens:
            self.stats.count(delta.drafted, delta.accepted, len(delta.tokens), delta.copied, delta.copies)
        self.written += len(delta.tokens)
        self.ended = delta.finish is not None
        return delta


class DeltaStream:
    """One request's deltas on their way from the receiving thread to an event loop, in which all methods are called."""

    def __init__(self, numbers: Sequence[int], sequences: Sequence[ServedSequence]) -> None:
        self.loop, self.numbers, self.sequences = asyncio.get_running_loop(), tuple(numbers), sequences
        self._error: Exception | None = None  # raised to the receiver in place of further deltas
        self._ready = asyncio.Event()
        self._deltas: defaultdict[int, list[SequenceDelta]] = defaultdict(list)  # by the sequence's index

    @property
    def ended(self) -> bool:
        """Return whether all of its sequences have ended."""
        return all(sequence.ended for sequence in self.sequences)

    def push(self, news: News) -> None:
        """Add deltas, or replace the waiting ones by an error. Nothing follows an error."""
        self._ready.set()
        if isinstance(news, Exception):
            self._error = self._error or news
            return
        for index, delta in news:
            self._deltas[index].append(delta)

    async def receive(self) -> dict[int, list[SequenceDelta]]:
        """Wait for deltas, and return all that have arrived by their sequence's index; raise the stream's error."""
        await self._ready.wait()
        if self._error is not None:
            raise self._error
        self._ready.clear()
        received, self._deltas = self._deltas, defaultdict(list)
        return received


class EngineClient:
    """Submits requests to an engine in another process, and distributes the deltas that it returns."""

    def __init__(self, channel: Channel, facts: EngineFacts, process: EngineProcess):
        self._channel, self.facts, self._process = channel, facts, process
        self.load = messages.EngineLoad()  # as last reported
        self.after_end = "nothing is served any more"  # what clients read after the reason of the engine's end
        # Called with every delta, in the receiving thread.
        self.on_delta: Callable[[ServedSequence, SequenceDelta], object] = lambda sequence, delta: None
        self._on_failure: Callable[[str], object] = lambda reason: None
        self._numbers = count()
        self._texts: dict[int, tuple[DeltaStream, int]] = {}  # sequences that have not ended: number to stream, index
        self._streams: set[DeltaStream] = set()  # streams that have a receiver
        self._changes: dict[int, Future[messages.Answered | Exception]] = {}  # pending changes, by number
        self._draining = self._stopping = False
        self._heard_at = time.monotonic()  # when the engine last sent a message
        self._failure: str | None = None  # reason reported by the engine
        self._thread = threading.Thread(target=self._run, name="redrafter-receiver", daemon=True)

    def start(self, on_failure: Callable[[str], object] = lambda reason: None) -> None:
        """Start the receiving thread, which calls `on_failure` with the reason if the engine ends by itself."""
        self._on_failure, self._heard_at = on_failure, time.monotonic()
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Return whether new requests are accepted."""
        return self._thread.is_alive() and not self._draining

    @property
    def healthy(self) -> bool:
        """Return whether new requests are accepted, and the engine is not stopped or blocked within a round."""
        return self.alive and time.monotonic() - self._heard_at < SILENT_SECONDS

    @property
    def idle(self) -> bool:
        """Return whether all sequences have ended."""
        return not self._texts

    @property
    def streams(self) -> int:
        """Number of requests that have a receiver."""
        return len(self._streams)

    def drain(self) -> None:
        """Reject new requests; accepted requests continue."""
        self._draining = True

    def stop(self) -> None:
        """End the engine, even if streams still have receivers."""
        self._draining = self._stopping = True
        self._channel.close()
        self._process.end()
        if self._thread.is_alive():
            self._thread.join()  # it ends because the connection is closed
        self._fail_all(Stopped())

    async def deltas(
        self, request: messages.Submit, sequences: Sequence[Text]
    ) -> AsyncGenerator[tuple[Text, list[SequenceDelta]], None]:
        """Submit the prompts of one request, and yield their sequences' deltas as they arrive.

        A consumer that is slower than the engine gets several deltas at once. Closing this iterator early cancels the
        remaining sequences. The request's images are released once the engine has them.

        Yields:
            A sequence and its deltas since it was last yielded, until all sequences have ended.

        Raises:
            Stopped: The server rejects new requests or is asleep, or it or the engine was stopped meanwhile.
            QueueFullError, ArgumentError: The engine's own refusals.
        """
        if not self.alive:
            raise Stopped
        if self.load.asleep:
            raise Stopped(ASLEEP)
        request = replace(request, numbers=tuple(next(self._numbers) for _ in sequences))
        stream = DeltaStream(request.numbers, sequences)
        self._streams.add(stream)
        try:
            # Registered before sending, since the engine may answer at once in the receiving thread.
            self._texts.update((number, (stream, index)) for index, number in enumerate(request.numbers))
            self._send(request)
            left = len(sequences)
            while left:
                received = await stream.receive()
                # Pixels were sent with the request; keeping them would hold memory as long as the sequence runs.
                if request.images:
                    request.images.clear()
                for index, new in received.items():
                    left -= new[-1].finish is not None
                    yield sequences[index], new
        finally:
            self._streams.discard(stream)
            # The client left or failed: free its slots in the engine.
            if not stream.ended:
                self._channel.send(messages.Cancel(stream.numbers))

    async def change_adapters(self, name: str, path: str | None) -> None:
        """Load a LoRA adapter from a directory of the engine's machine, or unload it if `path` is None.

        Raises:
            Stopped: The server rejects new requests, or it or the engine was stopped meanwhile.
            ReDrafterError: The adapter cannot be loaded, or does not exist.
        """
        await self._change(messages.ChangeAdapters(name, path))

    async def change_engine(self, kind: str, path: str | None = None) -> tuple[str, ...]:
        """Change the engine between two steps. `kind` and `path` are as in `ChangeEngine`.

        Returns the names of tensors that were written with NaN or infinite values. Raises the errors of
        `change_adapters`.
        """
        return (await self._change(messages.ChangeEngine(kind, path))).not_finite

    async def _change(self, change: messages.ChangeAdapters | messages.ChangeEngine) -> messages.Answered:
        """Send a change with a new number, and wait for the engine's answer."""
        if not self.alive:
            raise Stopped
        number, answer = next(self._numbers), Future[messages.Answered | Exception]()
        self._changes[number] = answer
        self._send(replace(change, number=number))
        outcome = await asyncio.wrap_future(answer)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _send(self, request: messages.Submit | messages.ChangeAdapters | messages.ChangeEngine) -> None:
        self._channel.send(request)
        if not self._thread.is_alive():  # it may have ended before the request was registered
            raise Stopped

    def _run(self) -> None:
        try:
            while True:
                self._handle(self._channel.receive())
        except EOFError:
            pass
        except Exception:
            _LOG.exception("the connection to the engine failed: nothing is served any more")
        self._draining = True
        # Waiting clients would wait forever unless every stream fails now.
        if not self._stopping:
            ended = self._process.describe_end()
            reason = f"{self._failure or ended}: {self.after_end}"
            self._fail_all(Stopped(reason))
            self._on_failure(reason)

    def _handle(self, message: messages.Written | messages.Answered | messages.Alive | messages.EngineFailed) -> None:
        self._heard_at = time.monotonic()
        if isinstance(message, messages.EngineFailed):
            self._failure = message.reason
        elif isinstance(message, messages.Alive):
            pass
        elif isinstance(message, messages.Answered):
            if message.numbers[0] in self._changes:
                self._settle(message.numbers[0], message.error or message)
            elif message.error is not None:
                [stream] = {self._texts.pop(number)[0] for number in message.numbers}
                _deliver({stream: message.error})
        else:
            self.load = message.load
            # A cancelled sequence may still be in messages that the engine sent before it knew.
            for number, (reused, queued, scores) in message.prompts.items():
                if number in self._texts:
                    stream, index = self._texts[number]
                    sequence = stream.sequences[index]
                    sequence.reused, sequence.queued = reused, queued
                    sequence.prompt_scores = scores or sequence.prompt_scores
            news: defaultdict[DeltaStream, list[tuple[int, SequenceDelta]]] = defaultdict(list)
            for number, delta in message.deltas:
                if number in self._texts:
                    stream, index = self._texts[number]
                    news[stream].append((index, self._take(number, stream.sequences[index], delta)))
            _deliver(news)

    def _take(self, number: int, sequence: ServedSequence, delta: SequenceDelta) -> SequenceDelta:
        by_engine = delta.finish
        try:
            delta = sequence.take(delta)
            self.on_delta(sequence, delta)
        except Exception as error:  # from a tokenizer during the search for stop strings: other sequences continue
            if not isinstance(error, ReDrafterError):
                _LOG.error("a text was given up", exc_info=error)
                error = ReDrafterError(f"the text cannot be read ({type(error).__name__})")
            delta, sequence.ended = SequenceDelta((), finish="error", error=error), True
            with suppress(Exception):
                self.on_delta(sequence, delta)
        if sequence.ended:
            del self._texts[number]
        if sequence.ended and by_engine is None:  # a stop string or an error here, which the engine does not know of
            self._channel.send(messages.Cancel((number,)))
        return delta

    def _fail_all(self, error: Stopped) -> None:
        self._texts.clear()
        for number in tuple(self._changes):
            self._settle(number, error)
        _deliver({stream: error for stream in tuple(self._streams) if not stream.ended})

    def _settle(self, number: int, outcome: messages.Answered | Exception) -> None:
        with suppress(InvalidStateError):  # no receiver is left
            self._changes.pop(number).set_result(outcome)


def _deliver(news: Mapping[DeltaStream, News]) -> None:
    """Push news to streams, in one call for each loop, since each call costs a system call."""
    by_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[DeltaStream, News]]] = defaultdict(list)
    for stream, new in news.items():
        by_loop[stream.loop].append((stream, new))

    def push(items: list[tuple[DeltaStream, News]]) -> None:
        for stream, new in items:
            stream.push(new)

    for loop, items in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed, so no receiver is left
            loop.call_soon_threadsafe(push, items)
