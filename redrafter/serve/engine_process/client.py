"""The server's side of the line to its engine: requests go out, and what the engine writes comes back as streams."""

import asyncio
import concurrent.futures
import logging
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Protocol

from redrafter.errors import ReDrafterError
from redrafter.grammar.source import GrammarSource
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.sequence import SequenceDelta, Stats
from redrafter.serve.delta_stream import DeltaStream, SlowConsumerError, Stopped
from redrafter.serve.engine_process.channel import Channel
from redrafter.serve.engine_process.loading import EngineFacts
from redrafter.serve.engine_process.messages import (
    AdaptersChanged,
    Cancel,
    ChangeAdapters,
    EngineFailed,
    EngineLoad,
    Refused,
    Submit,
    Written,
)
from redrafter.serve.served_sequence import ServedSequence

__all__ = ["EngineClient", "EngineHandle"]

_LOG = logging.getLogger(__name__)

FindStop = Callable[[Sequence[int]], int | None]
Change = concurrent.futures.Future[None]


class EngineHandle(Protocol):
    """Whatever runs the other end of the line."""

    def end(self) -> None:
        """Wait until it has ended, once the line is closed, and end it by force if it does not."""

    def describe_end(self) -> str:
        """Return how it ended by itself, in one line."""


class EngineClient:
    """Asks an engine in another process for texts, and hands out what it writes.

    Attributes:
        facts: What the engine has said of itself.
        load: How busy it said that it is.
        on_delta: Called with every delta, in the thread that receives them.
    """

    def __init__(self, channel: Channel, facts: EngineFacts, handle: EngineHandle):
        """Make a client that has not started.

        Args:
            channel: The line to the engine.
            facts: What the engine has said of itself.
            handle: The engine's process.
        """
        self._channel, self.facts, self._handle = channel, facts, handle
        self.load = EngineLoad()
        self.on_delta: Callable[[ServedSequence, SequenceDelta], object] = lambda sequence, delta: None
        self._on_failure: Callable[[str], object] = lambda reason: None
        self._numbers = count()
        self._texts: dict[int, tuple[DeltaStream, int]] = {}  # those that have not ended: stream, and place in it
        self._streams: set[DeltaStream] = set()  # those that somebody receives from
        self._changes: dict[int, Change] = {}  # of adapters, that the engine has not answered
        self._draining = self._stopping = False
        self._failure: str | None = None  # as the engine has told it
        self._thread = threading.Thread(target=self._run, name="redrafter-receiver", daemon=True)

    def start(self, on_failure: Callable[[str], object] = lambda reason: None) -> None:
        """Start to receive, in a thread.

        Args:
            on_failure: Called in that thread if the engine ends by itself, with how it ended.
        """
        self._on_failure = on_failure
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether new requests are accepted."""
        return self._thread.is_alive() and not self._draining

    @property
    def idle(self) -> bool:
        """Whether all texts have ended."""
        return not self._texts

    @property
    def streams(self) -> int:
        """Number of requests whose deltas somebody receives."""
        return len(self._streams)

    def drain(self) -> None:
        """Accept nothing new; requests that were accepted go on."""
        self._draining = True

    def stop(self) -> None:
        """End the engine, whether or not anybody still receives."""
        self._draining = self._stopping = True
        self._channel.close()
        self._handle.end()
        if self._thread.is_alive():
            self._thread.join()  # the line is closed
        self._fail_all(Stopped())

    async def deltas(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        params: SamplingParams,
        make_find_stop: Callable[[], FindStop | None],
        grammar: GrammarSource | None = None,
        client: str = "",
        cache_salt: str | None = None,
        adapter: str | None = None,
        images: dict[str, Any] | None = None,
    ) -> AsyncGenerator[tuple[int, ServedSequence, list[SequenceDelta]], None]:
        """Ask for a text after each prompt of one request, after prompt i with seed + i, and yield their deltas.

        A consumer that is slower than the engine gets more at once. One that receives nothing for `MAX_BEHIND_SECONDS`
        while `MAX_PENDING_TOKENS` tokens wait is dropped. Closing this iterator early cancels the rest.

        Args:
            prompts: Token ids of each prompt.
            max_new_tokens: Most tokens that may follow each.
            params: How tokens are drawn, without a grammar.
            make_find_stop: Makes the `find_stop` of one sequence, or None.
            grammar: Grammar that the texts must follow, or None.
            client: Who asks, as far as fairness goes.
            cache_salt: Prefixes are reused only from requests with the same salt.
            adapter: Name of the LoRA adapter of all texts; None for the model alone.
            images: What the model takes of the images in each of the prompts, which are equal; None for text. It may
                be hundreds of megabytes, and is emptied once the engine has it.

        Yields:
            The index of a prompt, its sequence, and its deltas since it was yielded last, until all have ended.

        Raises:
            Stopped: The server accepts nothing new, or it or the engine was stopped meanwhile.
            SlowConsumerError: The deltas were not received in time.
            QueueFullError: Too many sequences wait.
            ArgumentError: One of the prompts can never be served, or the grammar cannot be followed.
        """
        if not self.alive:
            raise Stopped
        ends, depth = params.stop_token_ids, self.facts.draft_depth
        sequences = [
            ServedSequence(prompt, ends, Stats(accepted_by_depth=[0] * depth), make_find_stop(), adapter)
            for prompt in prompts
        ]
        stream = DeltaStream(asyncio.get_running_loop(), [next(self._numbers) for _ in prompts], sequences)
        self._streams.add(stream)
        try:
            self._texts.update({number: (stream, index) for index, number in enumerate(stream.numbers)})
            text = (stream.numbers, prompts, max_new_tokens, params, grammar, client, cache_salt)
            self._channel.send(Submit(*text, adapter, images))
            if not self._thread.is_alive():  # it may have ended before it could see the request
                raise Stopped
            left = len(prompts)
            while left:
                deltas: defaultdict[int, list[SequenceDelta]] = defaultdict(list)
                received = await stream.receive()
                if images:
                    images.clear()
                for index, delta in received:
                    deltas[index].append(delta)
                    left -= delta.finish is not None
                for index, new in deltas.items():
                    yield index, sequences[index], new
        finally:
            self._streams.discard(stream)
            if not all(sequence.ended for sequence in sequences):
                self._channel.send(Cancel(stream.numbers))

    async def change_adapters(self, name: str, path: str | None) -> None:
        """Load a LoRA adapter from a directory of the engine's machine, or unload it.

        Args:
            name: Name of the adapter.
            path: Directory to load it from; None to unload it.

        Raises:
            Stopped: The server accepts nothing new, or it or the engine was stopped meanwhile.
            ReDrafterError: It cannot be loaded, or there is no such adapter.
        """
        if not self.alive:
            raise Stopped
        number, change = next(self._numbers), Change()
        self._changes[number] = change
        self._channel.send(ChangeAdapters(number, name, path))
        if not self._thread.is_alive():  # it may have ended before it could see the request
            raise Stopped
        await asyncio.wrap_future(change)

    def _run(self) -> None:
        """Receive messages until the line ends."""
        try:
            while True:
                self._handle_message(self._channel.receive())
        except EOFError:
            pass
        except Exception:
            _LOG.exception("the line to the engine failed: nothing is served any more")
        self._draining = True
        if not self._stopping:
            ended = self._handle.describe_end()
            reason = f"{self._failure or ended}: nothing is served any more"
            self._fail_all(Stopped(reason))
            self._on_failure(reason)

    def _handle_message(self, message: Written | Refused | AdaptersChanged | EngineFailed) -> None:
        if isinstance(message, EngineFailed):
            self._failure = message.reason
            return
        if isinstance(message, AdaptersChanged):
            self._changed(message)
            return
        if isinstance(message, Refused):
            self._refuse(message)
            return
        self.load = message.load
        for number, facts in message.prompts.items():
            if number in self._texts:
                stream, index = self._texts[number]
                sequence = stream.sequences[index]
                sequence.reused, sequence.prompt_scores = facts.reused, facts.scores or sequence.prompt_scores
        written = {self._append(number, delta) for number, delta in message.deltas if number in self._texts}
        _wake(stream for stream in written if not stream.woken)

    def _append(self, number: int, delta: SequenceDelta) -> DeltaStream:
        """Hand a delta to the stream of its text, and return the stream."""
        stream, index = self._texts[number]
        sequence, by_engine = stream.sequences[index], delta.finish
        try:
            delta = sequence.append(delta)
            self.on_delta(sequence, delta)
        except Exception as error:  # of a tokenizer, where stop strings are looked for: others go on
            if not isinstance(error, ReDrafterError):
                _LOG.error("a text was given up", exc_info=error)
                error = ReDrafterError(f"the text cannot be read ({type(error).__name__})")
            delta, sequence.ended = SequenceDelta((), finish="error", error=error), True
            with suppress(Exception):
                self.on_delta(sequence, delta)
        stream.write(index, delta)
        if sequence.ended:
            del self._texts[number]
        if sequence.ended and by_engine is None:  # at a stop string or an error, of which the engine knows nothing
            self._channel.send(Cancel((number,)))
        if stream.abandoned:
            stream.fail(SlowConsumerError(f"{stream.pending} tokens were written that nobody took: cancelled"))
            self._channel.send(Cancel(stream.numbers))
        return stream

    def _refuse(self, refused: Refused) -> None:
        for number in refused.numbers:
            stream, _ = self._texts.pop(number)
            stream.fail(refused.error)
        _wake([stream])

    def _changed(self, message: AdaptersChanged) -> None:
        change = self._changes.pop(message.number)
        if not change.set_running_or_notify_cancel():
            return  # nobody waits for it any more
        if message.error is None:
            change.set_result(None)
        else:
            change.set_exception(message.error)

    def _fail_all(self, error: Stopped) -> None:
        """Let everybody who still receives get an error."""
        self._texts.clear()
        for change in (self._changes.pop(number) for number in tuple(self._changes)):
            if change.set_running_or_notify_cancel():
                change.set_exception(error)
        unfinished = [
            stream for stream in tuple(self._streams) if not all(sequence.ended for sequence in stream.sequences)
        ]
        for stream in unfinished:
            stream.fail(error)
        _wake(unfinished)


def _wake(streams: Iterable[DeltaStream]) -> None:
    """Wake the receivers of streams, in one call for each loop, since each call costs a system call."""
    by_loop: defaultdict[asyncio.AbstractEventLoop, list[DeltaStream]] = defaultdict(list)
    for stream in streams:
        stream.woken = True
        by_loop[stream.loop].append(stream)
    for loop, waiting in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed: nobody receives any more
            loop.call_soon_threadsafe(_wake_in_loop, waiting)


def _wake_in_loop(streams: Sequence[DeltaStream]) -> None:
    for stream in streams:
        stream.wake()
