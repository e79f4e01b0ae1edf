"""The life of a server process: listen at once, answer 503 while the model loads, serve, drain, end."""

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
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from redrafter.errors import ArgumentError
from redrafter.serve.config import ServeOptions
from redrafter.serve.engine_process.start import EngineEndedError
from redrafter.serve.network.connections import PARTING_SECONDS, Connection, OpenConnections, room_for_connections
from redrafter.serve.network.guards import Refusal, error_answer
from redrafter.serve.routes.page import page

if TYPE_CHECKING:  # it imports torch
    from redrafter.serve.engine_process.client import EngineClient
    from redrafter.serve.server import Server

_LOG = logging.getLogger(__name__)
ACCEPTED_AT_ONCE = 32  # connections in one turn of the event loop, before others are closed to make room
BACKLOG_CONNECTIONS = 2048  # that the system keeps until they are accepted
LOADING_LOG_SECONDS = 15.0  # between log lines while the model is being loaded
ACCEPT_ERROR_LOG_SECONDS = 5.0  # between log lines about connections that cannot be accepted
FORCED_END_SECONDS = 5.0  # after which a process that was told to end is ended by force


class ServerProcess:
    """Serves on a bound socket: answers 503 until a load has returned, then with the loaded application."""

    def __init__(self, options: ServeOptions, listening: socket.socket):
        self.options, self._listening = options, listening
        self._connections = OpenConnections(room_for_connections(options.max_connections))
        self._loaded: Server | None = None
        # Shown while the model loads: their scripts ask again until it is there.
        self._loading_pages = {"/": page("page.html", 503), "/docs": page("docs.html", 503)}
        self._ending: asyncio.Future[None] | None = None
        self._engine_end: str | None = None  # how the engine has ended by itself
        self._accept_error_at = -ACCEPT_ERROR_LOG_SECONDS  # when such an error was last logged
        config = uvicorn.Config(
            self._answer,
            http=functools.partial(Connection, self._connections),  # type: ignore[arg-type]
            ws="none",
            interface="asgi3",
            lifespan="off",
            backlog=ACCEPTED_AT_ONCE,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=3600,  # `IDLE_SECONDS` is shorter
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

    def run(self, load: Callable[[], "Server"], ready: Callable[["Server"], object]) -> None:
        """Serve until SIGINT or SIGTERM.

        The first signal lets running requests end within `--drain-timeout`; a second one drops them. `load` is called
        in a thread, while every request is answered with 503; what it raises ends the server. `ready` is called with
        what was loaded, once it is served.

        Raises:
            EngineEndedError: The engine has ended by itself; running requests have got an error.
        """
        try:
            asyncio.run(self._serve(load, ready))
        finally:
            if self._loaded is not None:
                self._loaded.engine.stop()
        if self._engine_end is not None:
            raise EngineEndedError(self._engine_end)

    async def _serve(self, load: Callable[[], "Server"], ready: Callable[["Server"], object]) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._log_loop_error)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        serving = asyncio.ensure_future(self._http.serve([self._listening]))
        watching = asyncio.ensure_future(self._connections.watch())
        while not self._http.started:
            await asyncio.sleep(0.01)
        self._listening.listen(BACKLOG_CONNECTIONS)  # uvicorn has set it to the number that are accepted at once
        try:
            began, loading = time.monotonic(), asyncio.ensure_future(asyncio.to_thread(load))
            while not (await asyncio.wait([loading], timeout=LOADING_LOG_SECONDS))[0]:
                _LOG.info("still loading after %.0f s", time.monotonic() - began)
            loaded = loading.result()
            gc.collect()
            gc.freeze()  # what is loaded stays; collecting it takes 0.3 s, in which no row steps
            loaded.engine.start(lambda reason: loop.call_soon_threadsafe(self._engine_ended, reason))
            self._loaded = loaded
            ready(loaded)
            await serving
        finally:
            if not serving.done():
                self._drop()
            await serving
            watching.cancel()
            if self._ending is not None:
                _end_by_force_after(FORCED_END_SECONDS, self._exit_code)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._loaded is not None:
            return await self._loaded.app(scope, receive, send)
        if scope["type"] != "http":
            return
        if scope["path"] == "/v1/health/live":
            return await Response()(scope, receive, send)
        refusal = Refusal(503, "the model is still being loaded", "loading")
        answer = self._loading_pages.get(scope["path"]) or error_answer(refusal)
        answer.headers["Retry-After"] = "5"
        await answer(scope, receive, send)

    def _stop(self) -> None:
        """Handle a signal: drain at the first, drop all connections at the second."""
        if self._loaded is None:
            _LOG.info("stopped while the model was being loaded")
            logging.shutdown()
            os._exit(0)  # the thread that loads would delay an orderly end
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
        """Let those who are connected hear of it, then end."""
        self._engine_end = reason
        if self._ending is None and self._loaded is not None:
            self._ending = asyncio.ensure_future(self._drain(self._loaded.engine, PARTING_SECONDS))

    async def _drain(self, engine: "EngineClient", seconds: float) -> None:
        """Wait for running requests for so many seconds, then end."""
        deadline = time.monotonic() + seconds
        while not engine.idle and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self._http.should_exit = True  # closes connections without a request, and accepts no new ones
        await asyncio.sleep(PARTING_SECONDS / 4)
        while self._connections.open and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self._drop()

    def _drop(self) -> None:
        """Close all connections at once, and end."""
        if left := len(self._connections.open):
            _LOG.info("dropped %d connections", left)
        self._http.should_exit = True
        self._connections.drop_all()
        asyncio.get_running_loop().call_later(PARTING_SECONDS, setattr, self._http, "force_exit", True)

    def _log_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error of the event loop; if connections cannot be accepted, once in a few seconds."""
        if "accept()" not in context.get("message", ""):
            return loop.default_exception_handler(context)
        if time.monotonic() - self._accept_error_at >= ACCEPT_ERROR_LOG_SECONDS:
            self._accept_error_at = time.monotonic()
            _LOG.error(
                "connections cannot be accepted: %s; %d are open", context.get("exception"), len(self._connections.open)
            )


def _end_by_force_after(seconds: float, code: int) -> None:
    """End the process with an exit code after so many seconds, if it has not ended by itself."""

    def end() -> None:
        _LOG.info("ended by force: a thread did not end in time")
        logging.shutdown()
        os._exit(code)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
