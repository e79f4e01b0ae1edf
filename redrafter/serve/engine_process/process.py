"""The main program of the engine's process: load, then serve messages of the connection until it closes.

Grammars are compiled once for all clients and cached for later requests, with limits on their number and size.
"""

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NoReturn, TypeVar
from weakref import WeakSet, WeakValueDictionary

from transformers import PreTrainedTokenizerBase

from redrafter.app.program import freeze_objects, run_command
from redrafter.errors import ReDrafterError, ends_device
from redrafter.features import TENSOR_PARALLELISM
from redrafter.grammar.grammar import Grammar, GrammarProcess
from redrafter.grammar.source import GrammarSource
from redrafter.sandbox.process import wait_for_end
from redrafter.scheduler.scheduler import Scheduler
from redrafter.scheduler.waiting_queue import QueueFullError
from redrafter.serve.encoding import ClientTurns
from redrafter.serve.engine_process import messages
from redrafter.serve.engine_process.engine import ServedEngine
from redrafter.serve.engine_process.start import Channel, LoadEngine
from redrafter.serve.engine_process.worker import SharedWorker, Worker
from redrafter.serve.log import start_logging

_LOG = logging.getLogger(__name__)

FLUSH_SECONDS = 5.0  # time limit for sending a last message
ORPHAN_SECONDS = 2.0  # time until the process exits forcibly after its server is gone
MAX_KEPT_GRAMMARS = 32  # grammars kept for later requests
MAX_KEPT_BYTES = 1 << 30  # total bytes of kept grammars
MAX_LIVING_GRAMMARS = 256  # grammars that a sequence uses or that are kept
MAX_LIVING_BYTES = 8 << 30  # total bytes of these
MAX_COMPILATIONS = 16  # grammars compiled concurrently
MAX_COMPILATIONS_PER_CLIENT = 10  # lower, so that one client's slow grammars do not block others
BEAT_SECONDS = 1.0  # interval of signs of life
COMPUTING = 0.01  # share of a processor above which a long round computes; a round that waits for ever takes none

Result = TypeVar("Result")


def main(descriptor: int) -> None:
    """Run the engine's process on the descriptor of a connection to its server, and exit with its code.

    Signals for the server are ignored: it ends this process by closing the connection, once its sequences have ended.
    """
    # A terminal sends these to all processes, but the server decides when the engine stops.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(descriptor)

    def end_with_server() -> None:
        """Exit soon after the server does, even during a long computation; nothing else would end this process."""
        wait_for_end(connection)
        # A regular stop also closes the connection, and ends the process by itself in this time.
        time.sleep(ORPHAN_SECONDS)
        os._exit(1)

    threading.Thread(target=end_with_server, daemon=True).start()
    sys.exit(run_command(lambda: _run(Channel(connection))))


def _run(channel: Channel) -> int:
    request: LoadEngine = channel.receive()
    start_logging(request.options.log_format, request.options.log_level)
    try:
        engine = ServedEngine.load(request)
    except ReDrafterError as error:
        channel.send(error)
        channel.close(FLUSH_SECONDS)
        return 2
    gc.collect()
    freeze_objects()  # loaded objects stay alive; scanning them would stop all rows for 0.3 s
    channel.send(engine.facts)
    return serve(channel, engine.scheduler, engine.pair.tokenizer)


def serve(channel: Channel, scheduler: Scheduler, tokenizer: PreTrainedTokenizerBase) -> int:
    """Serve with a scheduler until the other end closes the channel. The tokenizer is for grammars.

    Returns:
        An exit code: 1 if a round has failed.
    """

    async def serve_channel() -> int:
        return await _EngineServer(channel, scheduler, tokenizer).serve_until_closed()

    return asyncio.run(serve_channel())


class _EngineServer:
    def __init__(self, channel: Channel, scheduler: Scheduler, tokenizer: PreTrainedTokenizerBase):
        self._channel, self._grammars = channel, Grammars(tokenizer)
        self._done = asyncio.Event()
        self._loop = asyncio.get_running_loop()

        # The engine's thread must not touch asyncio objects directly.
        def end() -> None:
            self._call(self._done.set)

        line = scheduler, channel.send, end
        shared = TENSOR_PARALLELISM in scheduler.engine.target.features
        self._worker = SharedWorker(*line, self._refuse, self._give_up) if shared else Worker(*line)
        # One thread, so that changes are made in the order in which they were requested.
        self._changing = ThreadPoolExecutor(1, "change")
        self._compiling: dict[tuple[int, ...], asyncio.Task[None]] = {}  # by the numbers of a request's sequences

    async def serve_until_closed(self) -> int:
        """Serve until the connection ends or the engine fails, and return the exit code of the process."""
        threading.Thread(target=self._receive, name="redrafter-receiver", daemon=True).start()
        ended = threading.Event()
        threading.Thread(target=self._send_signs_of_life, args=(ended,), name="redrafter-pulse", daemon=True).start()
        self._worker.start()
        await self._done.wait()
        ended.set()
        await asyncio.to_thread(self._worker.stop)
        if (failure := self._worker.failure) is not None:
            self._channel.send(messages.EngineFailed(failure))
        self._channel.close(FLUSH_SECONDS)
        return 0 if failure is None else 1

    def _send_signs_of_life(self, ended: threading.Event) -> None:
        """Send signs of life, except while a round that should advance neither ends nor computes.

        Half a round may take minutes, as that of a long prompt on a CPU, a compilation or a capture: it takes processor
        time. One that is blocked takes none, and nothing comes from a process that is stopped.
        """
        halves, computed = -1, 0.0
        while not ended.wait(BEAT_SECONDS):
            before, since = halves, computed
            halves, computed = self._worker.halves, time.process_time() - time.thread_time()
            if self._worker.idle or halves != before or computed - since > COMPUTING * BEAT_SECONDS:
                self._channel.send(messages.Alive())

    def _give_up(self, reason: str) -> NoReturn:
        """Send the reason to all clients and exit, although the worker's thread waits for ever."""
        self._channel.send(messages.EngineFailed(reason))
        self._channel.close(FLUSH_SECONDS)
        os._exit(1)

    def _receive(self) -> None:
        try:
            while True:
                message = self._channel.receive()
                # Most requests are submitted here: each switch to another thread delays a first token.
                if isinstance(message, messages.Submit) and message.grammar is None:
                    self._submit(message)
                else:
                    self._call(self._handle, message)
        except EOFError:
            pass
        finally:  # also after an unreadable message: without its connection the engine is useless
            self._call(self._done.set)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the event loop, from another thread; do nothing if the loop has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _handle(self, message: messages.FromServer) -> None:
        if isinstance(message, messages.Cancel):
            # The client no longer waits for its grammar.
            if (task := self._compiling.get(message.numbers)) is not None:
                task.cancel()
            self._worker.cancel(message.numbers)  # the task may already have submitted them
        elif isinstance(message, messages.ChangeAdapters | messages.ChangeEngine):
            self._changing.submit(self._change, message)
        elif message.grammar is not None:
            task = asyncio.ensure_future(self._compile(message, message.grammar))
            self._compiling[message.numbers] = task
            task.add_done_callback(lambda _: self._compiled(message, task))

    async def _compile(self, request: messages.Submit, source: GrammarSource) -> None:
        try:
            self._worker.submit(request, await self._grammars.get(source, request.client))
        except Exception as error:
            self._refuse(request, error)

    def _compiled(self, request: messages.Submit, task: "asyncio.Task[None]") -> None:
        """Remove a finished compilation, and report it to the server if it was cancelled, even before it began."""
        del self._compiling[request.numbers]
        if task.cancelled():
            self._refuse(request, ReDrafterError("its client has gone"))

    def _submit(self, request: messages.Submit) -> None:
        try:
            self._worker.submit(request, None)
        except Exception as error:
            self._refuse(request, error)

    def _change(self, message: messages.ChangeAdapters | messages.ChangeEngine) -> None:
        def answer(error: ReDrafterError | None, not_finite: Sequence[str]) -> None:
            self._channel.send(messages.Answered((message.number,), error, tuple(not_finite)))

        try:
            self._worker.change(message, answer)
        except Exception as failure:
            answer(self._sendable(failure, "the engine could not be changed"), ())

    def _sendable(self, error: Exception, what: str) -> ReDrafterError:
        """Return the error to send to a client. The details of internal errors are only logged; clients get `what`."""
        if isinstance(error, ReDrafterError):
            return error
        _LOG.error("%s", what, exc_info=error)
        if ends_device(error):
            self._worker.fail(error)
        return messages.EngineError(f"{what}; the engine's log has the reason")

    def _refuse(self, request: messages.Submit, error: Exception) -> None:
        what = f"the request {request.request_id} could not be begun"
        self._channel.send(messages.Answered(request.numbers, self._sendable(error, what)))


class Grammars:
    """Compiled grammars over the vocabulary of one tokenizer. All methods must be called in the event loop's thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._kept: OrderedDict[GrammarSource, Grammar] = OrderedDict()
        self._living: WeakSet[Grammar] = WeakSet()
        self._locks: WeakValueDictionary[GrammarSource, asyncio.Lock] = WeakValueDictionary()
        self._turns = ClientTurns(MAX_COMPILATIONS, MAX_COMPILATIONS_PER_CLIENT)
        self._threads = ThreadPoolExecutor(MAX_COMPILATIONS, "grammar")  # the threads only wait for processes

    async def get(self, source: GrammarSource, client: str) -> Grammar:
        """Return a compiled grammar, cached if possible, or raise `ArgumentError` or `QueueFullError`.

        A grammar is compiled once for all who ask for it at the same time. The compilation ends if its request is
        cancelled; another request then begins again. Each client waits for at most `MAX_COMPILATIONS_PER_CLIENT`.
        """
        lock = self._locks.setdefault(source, asyncio.Lock())
        async with self._turns.for_client(client), lock:
            if (kept := self._kept.get(source)) is not None and kept.alive:
                self._kept.move_to_end(source)
                return kept
            async with self._turns.all:
                self._check()
                return await self._compile(source)

    def _check(self) -> None:
        """Raise if too many grammars are in use."""
        if len(self._living) >= MAX_LIVING_GRAMMARS:
            raise QueueFullError(f"{MAX_LIVING_GRAMMARS} other grammars are in use, and no more may be")
        if sum(grammar.memory for grammar in self._living) > MAX_LIVING_BYTES:
            raise QueueFullError(f"other grammars that are in use hold {MAX_LIVING_BYTES >> 30} GB, and no more may be")

    async def _compile(self, source: GrammarSource) -> Grammar:
        process = await self._in_thread(lambda: GrammarProcess(self._tokenizer))
        try:
            grammar = await self._in_thread(lambda: Grammar(source, self._tokenizer, process))
        except asyncio.CancelledError:
            process.end()
            raise
        self._living.add(grammar)
        self._kept[source] = grammar
        self._kept.move_to_end(source)
        # The last grammar stays even if it is too large, since a request is about to use it.
        held_bytes = sum(grammar.memory for grammar in self._kept.values())
        while len(self._kept) > MAX_KEPT_GRAMMARS or (held_bytes > MAX_KEPT_BYTES and len(self._kept) > 1):
            held_bytes -= self._kept.popitem(last=False)[1].memory
        return grammar

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
