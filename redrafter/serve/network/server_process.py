"""Run a server process: listen at once, answer 503 while the model loads, serve, drain, end.

This module also limits the number of open connections, and how long each may keep the server waiting.
"""

import asyncio
import functools
import gc
import json
import logging
import os
import re
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import uvicorn
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from redrafter.errors import ArgumentError
from redrafter.serve.config import ServeOptions
from redrafter.serve.engine_process.start import EngineEndedError
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
ACCEPTED_AT_ONCE = 32  # connections accepted per event-loop iteration, before idle ones are closed for room
BACKLOG_CONNECTIONS = 2048  # queued by the system until they are accepted
LOADING_LOG_SECONDS = 15.0  # between log lines while the model is being loaded
FORCED_END_SECONDS = 5.0  # time from a signal to end until the process is killed
MAX_CONNECTIONS = 1024  # if enough files may be opened
SPARE_FILES = 64  # descriptors reserved for later files and closing connections
HEADERS_SECONDS = 10.0  # time limit for a request line and headers to arrive
IDLE_SECONDS = 30.0  # time that a connection may stay open without a request
STALLED_SECONDS = 60.0  # time in which a client must read some of its answer
PARTING_SECONDS = 1.0  # time for a rejected client to read the error
WRITE_BUFFER_BYTES = 1 << 16  # of an answer buffered for a client, in addition to the system's buffers
MAX_HEAD_BYTES = 1 << 16  # of a request line and headers, and of what follows a body
MIN_CHUNK_BYTES = 64  # smaller average chunks are rejected: each one is parsed by itself
_SMALL_CHUNK = re.compile(rb"\r\n0*[0-9a-fA-F]{1,2}(?:;[^\r\n]*)?\r\n")  # the size of a chunk below 256 bytes


class ServerProcess:
    """Serves on a bound socket: answers 503 while `load` runs, then serves the loaded application."""

    def __init__(self, options: ServeOptions, listening: socket.socket):
        self.options, self._listening = options, listening
        self._connections = OpenConnections(room_for_connections(options.max_connections))
        self._loaded: Server | None = None
        self._app: ASGIApp | None = None  # application of the loaded server
        # Pages shown while the model loads; their scripts poll until it is loaded.
        self._loading_pages = {"/": page("page.html", 503), "/docs": page("docs.html", 503)}
        self._ending: asyncio.Future[None] | None = None
        self._doing: Callable[[], str] = lambda: "loading"  # current activity of the load
        self._engine_end: str | None = None  # description of an unexpected end of the engine
        config = http_config(self._answer, self._connections, options)
        self._http = uvicorn.Server(config)
        self._http.capture_signals = nullcontext  # type: ignore[assignment, method-assign]  # ours are set below

    def serve_until_signal(
        self,
        load: Callable[[], "tuple[Server, ASGIApp]"],
        ready: Callable[["Server"], object],
        doing: Callable[[], str] = lambda: "loading",
    ) -> None:
        """Serve until SIGINT or SIGTERM.

        The first signal lets running requests finish within `--drain-timeout`; a second one drops them. `load` is
        called in a thread and returns the server and its application; until then every request is answered with 503,
        and an exception from it ends the server. `ready` is called with the server once it is served. `doing`
        describes the current activity of `load`, such as "loading", for the log and for requests.

        Raises:
            EngineEndedError: The engine ended unexpectedly; running requests received an error.
        """
        self._doing = doing
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
        watching = asyncio.ensure_future(self._connections.watch())
        while not self._http.started:
            await asyncio.sleep(0.01)
        self._listening.listen(BACKLOG_CONNECTIONS)  # uvicorn sets it to the number accepted at once
        try:
            # Health probes are answered while the model loads in a thread.
            began, loading = time.monotonic(), asyncio.ensure_future(asyncio.to_thread(load))
            while not (await asyncio.wait([loading], timeout=LOADING_LOG_SECONDS))[0]:
                _LOG.info("still %s after %.0f s", self._doing(), time.monotonic() - began)
            loaded, app = loading.result()
            gc.collect()
            gc.freeze()  # loaded objects stay alive; scanning them would stop all rows for 0.3 s
            loaded.engine.start(lambda reason: loop.call_soon_threadsafe(self._engine_ended, reason))
            self._loaded, self._app = loaded, app
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
        if self._app is not None:
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return
        # Alive though not ready: an orchestrator must not restart a server for slow loading.
        if scope["path"] == "/v1/health/live":
            return await Response()(scope, receive, send)
        refusal = ApiError(503, f"the model is still {self._doing()}", code="loading")
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
        while self._connections.open and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self._drop()

    def _drop(self) -> None:
        if left := len(self._connections.open):
            _LOG.info("dropped %d connections", left)
        self._http.should_exit = True
        self._connections.drop_all()
        asyncio.get_running_loop().call_later(PARTING_SECONDS, setattr, self._http, "force_exit", True)


def http_config(app: ASGIApp, connections: "OpenConnections", options: ServeOptions) -> uvicorn.Config:
    """Return the configuration of the HTTP server, or raise `ArgumentError` for certificates that cannot be used."""
    config = uvicorn.Config(
        app,
        http=functools.partial(Connection, connections),  # type: ignore[arg-type]
        ws="none",
        interface="asgi3",
        lifespan="off",
        backlog=ACCEPTED_AT_ONCE,
        log_config=None,
        access_log=False,
        server_header=False,
        reset_contextvars=True,  # otherwise a pipelined request inherits the context of the previous one
        timeout_keep_alive=3600,  # never reached: `IDLE_SECONDS` is shorter
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


class OpenConnections:
    """The open connections of a server. Idle connections are closed to make room for new ones."""

    def __init__(self, max_connections: int):
        self.max_connections = max_connections
        self.open: set[Connection] = set()
        self.waiting: dict[Connection, float] = {}  # connections without a request, with deadlines; oldest first
        self.stalled: dict[Connection, float] = {}  # connections whose client does not read, with deadlines

    def admit(self, connection: "Connection") -> bool:
        """Add a connection, closing the longest idle one if necessary; return False if there is no room."""
        if len(self.open) >= self.max_connections:
            longest = next(iter(self.waiting), None)
            if longest is None:
                return False
            self.drop(longest)
        self.open.add(connection)
        return True

    def await_request(self, connection: "Connection", seconds: float) -> None:
        """Set the deadline for the next request of a connection to `seconds` from now."""
        self.waiting.pop(connection, None)  # reinsert at the end of the order
        self.waiting[connection] = time.monotonic() + seconds

    def remove(self, connection: "Connection") -> None:
        """Forget a connection that is closed."""
        for group in (self.waiting, self.stalled):
            group.pop(connection, None)
        self.open.discard(connection)

    def drop(self, connection: "Connection") -> None:
        """Close a connection at once, and discard data that its client has not read."""
        self.remove(connection)
        connection.transport.abort()

    def drop_all(self) -> None:
        """Close all connections at once."""
        for connection in list(self.open):
            self.drop(connection)

    async def watch(self) -> None:
        """Drop connections that keep the server waiting for too long, until this task is cancelled."""
        while True:
            await asyncio.sleep(min(HEADERS_SECONDS, IDLE_SECONDS, STALLED_SECONDS, 10.0) / 10)
            now = time.monotonic()
            for group in (self.waiting, self.stalled):
                for connection in [connection for connection, deadline in group.items() if deadline < now]:
                    self.drop(connection)


class Connection(HttpToolsProtocol):
    """A connection that reports its waits to `OpenConnections`. If there is no room for it, it is answered with 503."""

    def __init__(self, connections: OpenConnections, **uvicorn: Any):
        super().__init__(**uvicorn)
        self._connections, self._begun, self._refused = connections, False, False
        self._unparsed = 0  # bytes received since the parser last reported a piece of a body or the end of a request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Admit the connection, or prepare to refuse it."""
        if not self._connections.admit(self):
            self.transport, self._refused = transport, True
            self.loop.call_later(PARTING_SECONDS, transport.abort)
            return
        # With a small buffer, slow clients are noticed early and hold little memory.
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        super().connection_made(transport)
        self._connections.await_request(self, HEADERS_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._connections.remove(self)
        if not self._refused:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Process received data, or reject the request."""
        if self._refused:  # reply only after the request: a client may ignore an earlier answer
            if not self._begun:
                self.transport.write(_answer("503 Service Unavailable", "too many connections"))
                if self.transport.can_write_eof():
                    self.transport.write_eof()
            self._begun = True
            return
        if self._has_tiny_chunks(data):
            return self._reject("400 Bad Request", f"the body comes in chunks of less than {MIN_CHUNK_BYTES} bytes")
        if not self._begun and not self._asking:
            # A keep-alive connection has sent the first bytes of its next request.
            self._connections.await_request(self, HEADERS_SECONDS)
        self._begun = True
        self._unparsed += len(data)
        self._parse(data)
        # The parser has no limit of its own for headers, nor for trailers.
        if self._unparsed > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._reject("431 Request Header Fields Too Large", f"the headers take more than {MAX_HEAD_BYTES} bytes")

    def _parse(self, data: bytes | memoryview) -> None:
        try:
            while data and not self.transport.is_closing():
                try:
                    return self.parser.feed_data(data)
                except HttpParserUpgrade as offer:
                    data = memoryview(data)[offer.args[0] :]
                    self._decline_offer()
        except HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _decline_offer(self) -> None:
        """Parse a head again without its offer of another protocol, such as HTTP/2 by Java's client.

        The parser stops after such a head, and would not read the body.
        """
        start = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        if start.startswith(b"CONNECT "):
            return self._reject("405 Method Not Allowed", "this server is no proxy")
        kept = (b"%b: %b" % header for header in self.headers if header[0] != b"upgrade")
        self.parser = HttpRequestParser(self)
        self.parser.feed_data(b"\r\n".join((start, *kept, b"\r\n")))

    def send_400_response(self, msg: str) -> None:
        """Reject what is no HTTP request. Two lengths of a body would let proxies split requests differently."""
        what = "its body may have a Content-Length or a Transfer-Encoding, not both"
        self._reject("400 Bad Request", f"{msg} Check its request line and headers; {what}")

    def on_headers_complete(self) -> None:
        """Begin the request, and record its arrival."""
        if not self.parser.should_upgrade():
            super().on_headers_complete()
            self._connections.waiting.pop(self, None)

    def on_body(self, body: bytes) -> None:
        """Add a piece of the body."""
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the body."""
        self._unparsed = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._begun = False
        if self in self._connections.open and not self._asking:  # there may be a pipelined one
            self._connections.await_request(self, IDLE_SECONDS)
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Stop writing until the client has read some of its answer."""
        self._connections.stalled[self] = time.monotonic() + STALLED_SECONDS
        super().pause_writing()

    def resume_writing(self) -> None:
        """Continue to write."""
        self._connections.stalled.pop(self, None)
        super().resume_writing()

    def _reject(self, status: str, message: str) -> None:
        # An answer that has begun cannot be followed by another one before it ends.
        if not (self._asking and self.cycle.response_started):
            self.transport.write(_answer(status, message))
        self.transport.close()

    def _has_tiny_chunks(self, data: bytes) -> bool:
        """Return whether a body has chunks so small that parsing them delays all other clients."""
        if not (self._asking and self.cycle.more_body):
            return False
        chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        return chunked and len(_SMALL_CHUNK.findall(data)) * MIN_CHUNK_BYTES > len(data) + 64 * MIN_CHUNK_BYTES

    @property
    def _asking(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete


def _answer(status: str, message: str) -> bytes:
    body = json.dumps(error_body(int(status[:3]), message)).encode()
    head = (
        f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


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
    if wanted is None:
        return min(MAX_CONNECTIONS, files)
    if wanted > files:
        raise ArgumentError(
            f"--max-connections {wanted} needs more files than may be open: at most {files}; see ulimit -n"
        )
    return wanted
