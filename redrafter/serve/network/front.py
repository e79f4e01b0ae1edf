"""The server's process: it listens from its first moment, answers once the model is loaded, and comes to an end."""

import asyncio
import functools
import gc
import logging
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol, TypeVar

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from redrafter.errors import ArgumentError
from redrafter.serve.config import ServeOptions
from redrafter.serve.network.connections import PARTING, Connection, Crowd, room_for_connections
from redrafter.serve.network.guard import Refusal, error_answer
from redrafter.serve.worker import Worker

__all__ = ["Front"]

_LOG = logging.getLogger(__name__)
ACCEPT_AT_ONCE = 32  # connections in one turn of the event loop, before any other makes room for them
BACKLOG = 2048  # connections that the system keeps until they are accepted
STILL = 15.0  # seconds between lines that say that loading goes on
PAUSE = 5.0  # seconds between lines about connections that cannot be accepted
GRACE = 5.0  # seconds after which a process that was told to end is ended by force


class Loaded(Protocol):
    """What loading comes to."""

    @property
    def app(self) -> ASGIApp: ...

    @property
    def worker(self) -> Worker: ...


L = TypeVar("L", bound=Loaded)


class Front:
    """Serves on a bound socket: 503 until `load` has returned, then what it returned."""

    def __init__(self, options: ServeOptions, listening: socket.socket):
        self.options, self._listening = options, listening
        self._crowd = Crowd(room_for_connections(options.max_connections))
        self._loaded: Loaded | None = None
        self._ending: asyncio.Future[None] | None = None
        self._told = -PAUSE
        config = uvicorn.Config(
            self._answer,
            http=functools.partial(Connection, self._crowd),  # type: ignore[arg-type]
            ws="none",
            interface="asgi3",
            lifespan="off",
            backlog=ACCEPT_AT_ONCE,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=3600,  # the crowd's own is shorter
            ssl_certfile=options.ssl_certfile,
            ssl_keyfile=options.ssl_keyfile,
            ssl_ca_certs=options.ssl_ca_certs,
            ssl_cert_reqs=ssl.CERT_REQUIRED if options.ssl_ca_certs else ssl.CERT_NONE,
        )
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(filter(None, (options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs)))
            reason = error.strerror or error
            raise ArgumentError(f"--ssl-certfile, --ssl-keyfile: {files} cannot be used: {reason}") from error
        self._http = uvicorn.Server(config)
        self._http.capture_signals = nullcontext  # type: ignore[assignment, method-assign]  # ours are set below

    def run(self, load: Callable[[], L], ready: Callable[[L], object]) -> None:
        """Serve until SIGINT or SIGTERM: the first lets what was begun end, for `--drain-timeout`; a second does not.

        load: called in a thread, while every request is answered with 503. What it raises ends the server.
        ready: told what was loaded, once it is served.
        """
        try:
            asyncio.run(self._serve(load, ready))
        finally:
            if self._loaded is not None:
                self._loaded.worker.stop()

    async def _serve(self, load: Callable[[], L], ready: Callable[[L], object]) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._unexpected)
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, self._stop)
        serving = asyncio.ensure_future(self._http.serve([self._listening]))
        watching = asyncio.ensure_future(self._crowd.watch())
        while not self._http.started:
            await asyncio.sleep(0.01)
        self._listening.listen(BACKLOG)  # which the number that are accepted at once has set too
        try:
            loaded = await self._load(load)
            loaded.worker.start()
            self._loaded = loaded
            ready(loaded)
            await serving
        finally:
            if not serving.done():
                self._drop()
            await serving
            watching.cancel()
            if self._ending is not None:
                _end_by_force_after(GRACE)

    async def _load(self, load: Callable[[], L]) -> L:
        began, loading = time.monotonic(), asyncio.ensure_future(asyncio.to_thread(load))
        while not (await asyncio.wait([loading], timeout=STILL))[0]:
            _LOG.info("still loading after %.0f s", time.monotonic() - began)
        loaded = loading.result()
        gc.collect()
        gc.freeze()  # what is loaded stays; looking through it again takes 0.3 s, in which no row steps
        return loaded

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._loaded is not None:
            return await self._loaded.app(scope, receive, send)
        if scope["type"] != "http":
            return
        if scope["path"] == "/v1/health/live":
            return await Response()(scope, receive, send)
        refusal = Refusal(503, "the model is still being loaded", "loading", {"Retry-After": "5"})
        await error_answer(refusal)(scope, receive, send)

    def _stop(self) -> None:
        """What a signal asks for."""
        if self._loaded is None:
            _LOG.info("stopped while the model was being loaded")
            logging.shutdown()
            os._exit(0)  # a thread within a library, as the one that loads, would hold an orderly end up
        if self._ending is not None:
            return self._drop()
        self._loaded.worker.drain()
        running, timeout = self._loaded.worker.scheduler.running, self.options.drain_timeout
        _LOG.info("stopping: %d texts are still written, for %g s at most; once more to drop them", running, timeout)
        self._ending = asyncio.ensure_future(self._end(self._loaded.worker))
        _end_by_force_after(timeout + GRACE)

    async def _end(self, worker: Worker) -> None:
        deadline = time.monotonic() + self.options.drain_timeout
        while not worker.scheduler.idle and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self._http.should_exit = True  # which closes what waits for nothing, and accepts nobody
        await asyncio.sleep(PARTING / 4)
        while self._crowd.open and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self._drop()

    def _drop(self) -> None:
        """End, whatever is left."""
        if left := len(self._crowd.open):
            _LOG.info("dropped %d connections", left)
        self._http.should_exit = True
        self._crowd.drop_all()
        asyncio.get_running_loop().call_later(PARTING, setattr, self._http, "force_exit", True)

    def _unexpected(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Say what the event loop met; of connections that cannot be accepted, seldom."""
        if "accept()" not in context.get("message", ""):
            return loop.default_exception_handler(context)
        if time.monotonic() - self._told >= PAUSE:
            self._told = time.monotonic()
            _LOG.error(
                "connections cannot be accepted: %s; %d are open", context.get("exception"), len(self._crowd.open)
            )


def _end_by_force_after(seconds: float) -> None:
    """End then with code 0, if the process is still there: it was told to, and what still runs was dropped."""

    def end() -> None:
        _LOG.info("ended by force: a thread did not end in time")
        logging.shutdown()
        os._exit(0)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
