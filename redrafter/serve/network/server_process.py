"""Run a server process: listen at once, answer 503 while the model loads, serve, drain, end."""

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
from typing import TYPE_CHECKING

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from redrafter.app.program import freeze_objects
from redrafter.errors import ArgumentError
from redrafter.serve.config import ServeOptions
from redrafter.serve.engine_process.start import END_SECONDS, EngineEndedError
from redrafter.serve.network.connections import PARTING_SECONDS, REQUEST_SECONDS, Connection, room_for_connections
from redrafter.serve.network.guards import error_answer
from redrafter.serve.protocol.requests import ApiError
from redrafter.serve.routes.page import page

try:
    from uvloop import run
except ImportError:  # it is not built for every platform; the loop of asyncio takes longer for each chunk of a stream
    from asyncio import run  # type: ignore[assignment]

if TYPE_CHECKING:  # it imports torch
    from redrafter.serve.engine_process.client import EngineClient
    from redrafter.serve.server import Server

_LOG = logging.getLogger(__name__)
ACCEPTED_AT_ONCE = 32  # connections accepted per event-loop iteration, before they are counted: fewer than spare files
BACKLOG_CONNECTIONS = 2048  # queued by the system until they are accepted
LOADING_LOG_SECONDS = 15.0  # between log lines while the model is being loaded
# Time from a signal to end until the process is killed: more than the engine's process has, before it is killed.
FORCED_END_SECONDS = END_SECONDS + 5.0


class ServerProcess:
    """Serves on a bound socket: answers 503 while `load` runs, then serves the loaded application."""

    def __init__(self, options: ServeOptions, listening: socket.socket):
        self.options, self._listening = options, listening
        self._loaded: Server | None = None
        self._app: ASGIApp | None = None  # application of the loaded server
        # Pages shown while the model loads; their scripts poll until it is loaded.
        self._loading_pages = {"/": page("page.html", 503), "/docs": page("docs.html", 503)}
        self._ending: asyncio.Future[None] | None = None
        self._engine_end: str | None = None  # description of an unexpected end of the engine
        max_connections = room_for_connections(options.max_connections)
        self._http = uvicorn.Server(http_config(self._answer, max_connections, options))
        self._http.capture_signals = nullcontext  # type: ignore[assignment, method-assign]  # ours are set below

    def serve_until_signal(
        self, load: Callable[[], "tuple[Server, ASGIApp]"], ready: Callable[["Server"], object]
    ) -> None:
        """Serve until SIGINT or SIGTERM.

        The first signal lets running requests finish within `--drain-timeout`; a second one drops them. `load` is
        called in a thread and returns the server and its application; until then every request is answered with 503,
        and an exception from it ends the server. `ready` is called with the server once it is served.

        Raises:
            EngineEndedError: The engine ended unexpectedly; running requests received an error.
        """
        try:
            run(self._serve(load, ready))
        finally:
            if self._loaded is not None:
                self._loaded.close()
        if self._engine_end is not None:
            raise EngineEndedError(self._engine_end)

    async def _serve(self, load: Callable[[], "tuple[Server, ASGIApp]"], ready: Callable[["Server"], object]) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        serving = asyncio.ensure_future(self._http.serve([self._listening]))
        while not self._http.started:
            await asyncio.sleep(0.01)
        self._listening.listen(BACKLOG_CONNECTIONS)  # uvicorn sets it to the number accepted at once
        try:
            # Health probes are answered while the model loads in a thread.
            began, loading = time.monotonic(), asyncio.ensure_future(asyncio.to_thread(load))
            while not (await asyncio.wait([loading], timeout=LOADING_LOG_SECONDS))[0]:
                _LOG.info("still loading after %.0f s", time.monotonic() - began)
            loaded, app = loading.result()
            gc.collect()
            freeze_objects()  # loaded objects stay alive; scanning them would stop all rows for 0.3 s
            loaded.engine.start(lambda reason: loop.call_soon_threadsafe(self._engine_ended, reason))
            self._loaded, self._app = loaded, app
            ready(loaded)
            await serving
        finally:
            if not serving.done():
                self._drop()
            await serving
            if self._ending is not None:
                _end_by_force_after(FORCED_END_SECONDS, self._exit_code)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is not None:
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return
        # Alive though not ready: an orchestrator must not restart a server for slow loading.
        if scope["path"] == "/v1/health/live":
            return await Response()(scope, receive, send)
        refusal = ApiError(503, "the model is still loading", code="loading")
        answer = self._loading_pages.get(scope["path"]) or error_answer(refusal, scope["path"])
        answer.headers["Retry-After"] = "5"
        await answer(scope, receive, send)

    def _stop(self) -> None:
        """Handle a signal: drain at the first, drop all connections at the second."""
        if self._loaded is None:
            _LOG.info("stopped while the model was being loaded")
            logging.shutdown()
            os._exit(0)  # the loading thread would delay a regular exit
        # A second signal ends the grace period.
        if self._ending is not None:
            return self._drop()
        self._loaded.drain()
        running, timeout = self._loaded.engine.load.running, self.options.drain_timeout
        _LOG.info("stopping: %d texts are still written, for %g s at most; once more to drop them", running, timeout)
        self._ending = asyncio.ensure_future(self._drain(self._loaded.engine, timeout))
        _end_by_force_after(timeout + FORCED_END_SECONDS, self._exit_code)

    @property
    def _exit_code(self) -> int:
        return 0 if self._engine_end is None else 2

    def _engine_ended(self, reason: str) -> None:
        self._engine_end = reason
        if self._ending is None and self._loaded is not None:
            self._ending = asyncio.ensure_future(self._drain(self._loaded.engine, PARTING_SECONDS))

    async def _drain(self, engine: "EngineClient", seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not engine.idle and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self._http.should_exit = True  # closes connections without a request, and accepts no new ones
        await asyncio.sleep(PARTING_SECONDS / 4)
        while self._http.server_state.connections and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self._drop()

    def _drop(self) -> None:
        self._http.should_exit = True
        if left := list(self._http.server_state.connections):
            _LOG.info("dropped %d connections", len(left))
        for connection in left:
            connection.transport.abort()  # and discard data that its client has not read
        asyncio.get_running_loop().call_later(PARTING_SECONDS, setattr, self._http, "force_exit", True)


def http_config(app: ASGIApp, max_connections: int, options: ServeOptions) -> uvicorn.Config:
    """Return the configuration of the HTTP server, or raise `ArgumentError` for certificates that cannot be used."""
    config = uvicorn.Config(
        app,
        http=functools.partial(Connection, max_connections),  # type: ignore[arg-type]
        ws="none",
        interface="asgi3",
        lifespan="off",
        backlog=ACCEPTED_AT_ONCE,
        log_config=None,
        access_log=False,
        server_header=False,
        reset_contextvars=True,  # otherwise a request inherits the context of the previous one, which reads it
        timeout_keep_alive=int(REQUEST_SECONDS),
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
    return config


def _end_by_force_after(seconds: float, code: int) -> None:
    def end() -> None:
        _LOG.info("ended by force: a thread did not end in time")
        logging.shutdown()
        # Interpreter shutdown would wait for the very thread that hangs.
        os._exit(code)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
