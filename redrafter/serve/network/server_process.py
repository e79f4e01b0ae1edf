"""Run a server process: limit connections, listen at once, answer 503 while the model loads, serve, drain, end.

A proxy, such as the nginx of examples/deploy, does more for strangers: it limits each address, and buffers heads,
bodies and answers.
"""

import asyncio
import functools
import gc
import json
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
from httptools import HttpParserError, HttpParserUpgrade
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from redrafter.app.program import freeze_objects
from redrafter.errors import ArgumentError
from redrafter.serve.config import ServeOptions
from redrafter.serve.engine_process.start import END_SECONDS, EngineEndedError
from redrafter.serve.network.guards import error_answer
from redrafter.serve.protocol.requests import ApiError, error_body
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

MAX_CONNECTIONS = 1024  # if enough files may be opened
SPARE_FILES = 64  # descriptors reserved for later files and closing connections
REQUEST_SECONDS = 30.0  # time for a request to begin, and then to arrive as a whole
PARTING_SECONDS = 1.0  # time for a rejected client to read the error
MAX_HEAD_BYTES = 1 << 14  # of a request line and headers, and of what surrounds the pieces of a body


class Connection(HttpToolsProtocol):
    """A connection that answers one request at a time.

    Bytes that follow a request before its answer is whole are dropped, and the connection ends with that answer:
    queued requests would cost memory, and reading must not pause, as a client that leaves is noticed by reading alone.
    """

    def __init__(self, max_connections: int, **uvicorn: Any):
        super().__init__(**uvicorn)
        self._max_connections = max_connections
        self._unparsed = 0  # bytes since the parser last finished a head, a piece of a body or a message
        self._refused = False  # there was no room for the connection
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Admit the connection, or prepare to refuse it."""
        super().connection_made(transport)
        self._refused = len(self.connections) > self._max_connections
        if self._refused:
            self.connections.discard(self)
        self._limit_wait(PARTING_SECONDS if self._refused else REQUEST_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data of the current request, and drop what follows it."""
        if self._refused:  # reply only after the request: a client may ignore an earlier answer
            return self.reject("503 Service Unavailable", "too many connections")
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        while rest and not self.transport.is_closing() and not self.answering:
            # Parsers limit neither heads nor what surrounds the pieces of a body, and take 1 us for each header.
            room = MAX_HEAD_BYTES - self._unparsed
            if room == 0:
                what = f"the headers take more than {MAX_HEAD_BYTES} bytes"
                return self.reject("431 Request Header Fields Too Large", what)
            piece, rest = bytes(rest[:room]), rest[room:]
            self._unparsed += len(piece)
            try:
                self.parser.feed_data(piece)
            except HttpParserUpgrade:  # an offer of another protocol, which is not taken
                pass
            except HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
            if self.cycle is not None and self.cycle.waiting_for_100_continue:
                self.cycle.keep_alive = False  # the body may never come, and the next request be read as one
        if self.answering and bytes(rest).strip(b"\r\n"):  # old clients end a body with an empty line
            self.cycle.keep_alive = False

    @property
    def answering(self) -> bool:
        """Return whether a whole request has arrived that has no whole answer yet."""
        return self.cycle is not None and not (self.cycle.response_complete or self.cycle.more_body)

    def on_message_begin(self) -> None:
        """Begin a request; stop the parser, which does not stop between requests, where an answer is not whole."""
        if self.answering:
            raise ValueError("a request follows one that has no answer yet")
        self._limit_wait(REQUEST_SECONDS)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header, but not one that follows the body, since headers were checked."""
        if self.cycle is None or self.cycle.scope is not self.scope:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer the request."""
        self._unparsed = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Add a piece of the body."""
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that the request has arrived."""
        self._unparsed = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._limit_wait(REQUEST_SECONDS)
        super().on_response_complete()

    def _limit_wait(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self._end_wait)

    def _end_wait(self) -> None:
        if not self.answering:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Reject bytes that are no HTTP request. Two lengths of a body would let proxies split requests differently."""
        if self.answering:
            self.cycle.keep_alive = False
        else:
            what = "its body may have a Content-Length or a Transfer-Encoding, not both"
            self.reject("400 Bad Request", f"{msg} Check its request line and headers; {what}")

    def reject(self, status: str, message: str) -> None:
        """Close the connection with an error, unless an answer has begun, which another one cannot interrupt."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = json.dumps(error_body(int(status[:3]), message)).encode()
            head = (
                f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
                f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


def open_file_limit() -> int:
    """Raise this process's limit of open files to the hard limit, and return it."""
    try:
        import resource
    except ImportError:  # systems without such limits
        return 1 << 30
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return 1 << 30 if soft == hard else soft
    # Each connection needs a file descriptor, and the usual soft limit is 1,024.
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def room_for_connections(wanted: int | None) -> int:
    """Return the limit of open connections: `wanted`, or `MAX_CONNECTIONS` by default.

    The default shrinks to the limit of open files; a `wanted` number above that limit raises `ArgumentError`.
    """
    taken = len(os.listdir("/dev/fd")) if os.path.isdir("/dev/fd") else 0
    files = max(open_file_limit() - taken - SPARE_FILES, 4)
    if wanted is not None and wanted > files:
        message = f"--max-connections {wanted} needs more files than may be open: at most {files}; see ulimit -n"
        raise ArgumentError(message)
    return min(MAX_CONNECTIONS, files) if wanted is None else wanted


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
