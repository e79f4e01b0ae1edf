"""The main program of the engine's process: load, then serve what comes over the connection until that ends."""

import asyncio
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from transformers import PreTrainedTokenizerBase

from redrafter.app.program import run_command
from redrafter.errors import ArgumentError, ReDrafterError
from redrafter.grammar.grammar import Grammar
from redrafter.grammar.source import GrammarSource
from redrafter.scheduler.scheduler import Scheduler
from redrafter.serve.engine_process.engine import ServedEngine, load_pair
from redrafter.serve.engine_process.grammars import Grammars
from redrafter.serve.engine_process.messages import Answered, Cancel, ChangeAdapters, EngineFailed, Submit
from redrafter.serve.engine_process.start import Channel, LoadEngine
from redrafter.serve.engine_process.worker import SharedWorker, Worker
from redrafter.serve.log import start_logging

_LOG = logging.getLogger(__name__)

FLUSH_SECONDS = 5.0  # for which a last message may take to be sent
ORPHAN_SECONDS = 2.0  # after which the process is ended by force once its server is gone
_NO_GRAMMARS = (
    "this server's model is shared by several processes, which follow no grammars yet (response_format, "
    "structured_outputs, a tool_choice that forces a call): leave them out, or start the server without torchrun"
)


def main(descriptor: int) -> None:
    """Run the engine's process on the descriptor of a Unix socket to its server, and exit with its code.

    Signals for the server are ignored: it ends this process by closing the connection, once its texts have ended.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)

    def end_with_server() -> None:
        """End the process soon after its server, whatever it does: nobody else would end it."""
        watch = select.poll()
        watch.register(connection, 0)  # no event but the closing of the other end
        watch.poll()
        time.sleep(ORPHAN_SECONDS)
        os._exit(1)

    threading.Thread(target=end_with_server, daemon=True).start()
    sys.exit(run_command(lambda: _run(Channel(connection))))


def _run(channel: Channel) -> int:
    """Load an engine and serve it; return the exit code of the process."""
    request: LoadEngine = channel.receive()
    start_logging(request.options.log_format, request.options.log_level)
    try:
        began = time.monotonic()
        pair = load_pair(request)
        _LOG.info("loaded %s in %.1f s", pair.name, time.monotonic() - began)
        engine = ServedEngine.of(pair, request.options, request.load)
        if request.options.warm_up:
            engine.warm_up()
    except ReDrafterError as error:
        channel.send(error)
        channel.close(FLUSH_SECONDS)
        return 2
    gc.collect()
    gc.freeze()  # what is loaded stays; collecting it takes 0.3 s, in which no row steps
    channel.send(engine.facts)
    return serve(channel, engine.scheduler, pair.tokenizer)


def serve(channel: Channel, scheduler: Scheduler, tokenizer: PreTrainedTokenizerBase) -> int:
    """Serve a scheduler without sequences until the other end closes the channel. The tokenizer is for grammars.

    Returns:
        An exit code: 1 if a round has failed.
    """

    async def run() -> int:
        return await _EngineServer(channel, scheduler, tokenizer).run()

    return asyncio.run(run())


class _EngineServer:
    """Answers the messages of a server in an event loop, in which it waits for grammars too."""

    def __init__(self, channel: Channel, scheduler: Scheduler, tokenizer: PreTrainedTokenizerBase):
        self._channel, self._grammars = channel, Grammars(tokenizer)
        self._done = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._shared = scheduler.engine.target.ranks.size > 1

        def end() -> None:
            self._call(self._done.set)

        line = scheduler, channel.send, end
        self._worker = SharedWorker(*line, self._refuse) if self._shared else Worker(*line)
        self._changing: set[asyncio.Task[None]] = set()
        self._compiling: dict[tuple[int, ...], asyncio.Task[None]] = {}  # by the numbers of a request's texts

    async def run(self) -> int:
        """Serve until the connection ends or the engine fails, and return the exit code of the process."""
        threading.Thread(target=self._receive, name="redrafter-receiver", daemon=True).start()
        self._worker.start()
        await self._done.wait()
        await asyncio.to_thread(self._worker.stop)
        if (failure := self._worker.failure) is not None:
            self._channel.send(EngineFailed(failure))
        self._channel.close(FLUSH_SECONDS)
        return 0 if failure is None else 1

    def _receive(self) -> None:
        """Hand messages to the event loop, in a thread of their own."""
        try:
            while True:
                self._call(self._handle, self._channel.receive())
        except EOFError:
            pass
        finally:  # also where a message cannot be read: an engine that hears nothing serves nobody
            self._call(self._done.set)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the event loop, from another thread; do nothing if the loop has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _handle(self, message: Submit | Cancel | ChangeAdapters) -> None:
        if isinstance(message, Cancel):
            if (task := self._compiling.get(message.numbers)) is not None:
                task.cancel()
            self._worker.cancel(message.numbers)  # the task may have submitted them a moment ago
        elif isinstance(message, ChangeAdapters):
            task = asyncio.ensure_future(asyncio.to_thread(self._change_adapters, message))
            self._changing.add(task)
            task.add_done_callback(self._changing.discard)
        elif message.grammar is None:
            self._submit(message, None)
        elif self._shared:
            self._refuse(message, ArgumentError(_NO_GRAMMARS))
        else:
            task = asyncio.ensure_future(self._compile(message, message.grammar))
            self._compiling[message.numbers] = task
            task.add_done_callback(lambda _: self._compiled(message, task))

    async def _compile(self, request: Submit, source: GrammarSource) -> None:
        """Submit a request once its grammar is compiled."""
        try:
            grammar = await self._grammars.get(source, request.client)
        except Exception as error:
            self._refuse(request, error)
        else:
            self._submit(request, grammar)

    def _compiled(self, request: Submit, task: "asyncio.Task[None]") -> None:
        """Forget a compilation; tell the server of one that was stopped, perhaps before it began."""
        del self._compiling[request.numbers]
        if task.cancelled():
            self._refuse(request, ReDrafterError("its client has gone"))

    def _submit(self, request: Submit, grammar: Grammar | None) -> None:
        try:
            self._worker.submit(request, grammar)
        except Exception as error:
            self._refuse(request, error)

    def _change_adapters(self, message: ChangeAdapters) -> None:
        """Load or unload an adapter, in a thread of its own, and tell the server."""
        error: Exception | None = None
        try:
            self._worker.change_adapters(message.name, message.path)
        except Exception as failure:
            error = _sendable(failure, "an adapter could not be changed")
        self._channel.send(Answered((message.number,), error))

    def _refuse(self, request: Submit, error: Exception) -> None:
        self._channel.send(Answered(request.numbers, _sendable(error, "a request could not be begun")))


def _sendable(error: Exception, what: str) -> Exception:
    """Return an error as the server may get it: one that is no error of the user is logged, with what it prevented."""
    if isinstance(error, ReDrafterError):
        return error
    _LOG.error(what, exc_info=error)
    return RuntimeError(str(error))  # another library's may not be picklable
