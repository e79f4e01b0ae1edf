"""Connections of clients: how many may be open, and how long each may keep the server waiting."""

import asyncio
import json
import logging
import os
import re
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from redrafter.errors import ArgumentError
from redrafter.serve.protocol.requests import error_body

_LOG = logging.getLogger(__name__)
MAX_CONNECTIONS = 1024  # if enough files may be opened
SPARE_FILES = 64  # kept for files that are opened later, and for connections that are being closed
HEADERS_SECONDS = 10.0  # in which the first line and the headers of a request must arrive
IDLE_SECONDS = 30.0  # for which a connection may stay open without a request
STALLED_SECONDS = 60.0  # in which a client must receive some of its answer
PARTING_SECONDS = 1.0  # in which a refused client can receive the refusal
WRITE_BUFFER_BYTES = 1 << 16  # of an answer that wait for a client, beside those in the system's buffers
READ_BUFFER_BYTES = 1 << 13  # each of which may be a chunk of a body
MIN_CHUNK_BYTES = 64  # a body in chunks that are smaller on average is refused, as each chunk costs about 10 us
_SMALL_CHUNK = re.compile(rb"\r\n0*[0-9a-fA-F]{1,2}(?:;[^\r\n]*)?\r\n")  # the size of a chunk below 256 bytes


class OpenConnections:
    """The open connections of a server. Those without a request make room for new ones."""

    def __init__(self, max_connections: int):
        self.max_connections = max_connections
        self.open: set[Connection] = set()
        self.waiting: dict[Connection, float] = {}  # those without a request: by when one must come; longest wait first
        self.stalled: dict[Connection, float] = {}  # those whose client does not read its answer: by when it must

    def admit(self, connection: "Connection") -> bool:
        """Add a connection, if need be in place of the one without a request for longest; return whether it fits."""
        if len(self.open) >= self.max_connections:
            longest = next(iter(self.waiting), None)
            if longest is None:
                return False
            self.drop(longest)
        self.open.add(connection)
        return True

    def await_request(self, connection: "Connection", seconds: float) -> None:
        """Note that a connection has so many seconds to send its next request."""
        self.waiting.pop(connection, None)  # so that it becomes the last one
        self.waiting[connection] = time.monotonic() + seconds

    def remove(self, connection: "Connection") -> None:
        """Forget a connection that is closed."""
        for group in (self.waiting, self.stalled):
            group.pop(connection, None)
        self.open.discard(connection)

    def drop(self, connection: "Connection") -> None:
        """Close a connection at once, with what its client has not read."""
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


class Connection(H11Protocol):
    """A connection that reports what it waits for to `OpenConnections`. One too many is answered with 503."""

    def __init__(self, connections: OpenConnections, **uvicorn: Any):
        super().__init__(**uvicorn)
        self._connections, self._begun, self._refused = connections, False, False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Admit the connection, or prepare to refuse it."""
        if not self._connections.admit(self):
            self.transport, self._refused = transport, True
            self.loop.call_later(PARTING_SECONDS, transport.abort)
            return
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if hasattr(transport, "max_size"):
            transport.max_size = READ_BUFFER_BYTES
        super().connection_made(transport)
        self._connections.await_request(self, HEADERS_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._connections.remove(self)
        if not self._refused:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on in a request, or refuse it."""
        if self._refused:  # only after its request: a client may not read an answer that comes before
            if not self._begun:
                self.transport.write(_answer("503 Service Unavailable", "too many connections"))
                if self.transport.can_write_eof():
                    self.transport.write_eof()
            self._begun = True
            return
        if self._has_tiny_chunks(data):
            self.transport.write(
                _answer("400 Bad Request", f"the body comes in chunks of less than {MIN_CHUNK_BYTES} bytes")
            )
            self.transport.close()
            return
        if not self._begun and not self._asking:
            self._connections.await_request(self, HEADERS_SECONDS)
        self._begun = True
        super().data_received(data)

    def handle_events(self) -> None:
        """Handle what was read, and note the arrival of a request."""
        super().handle_events()
        if self._asking:
            self._connections.waiting.pop(self, None)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._begun = False
        if self in self._connections.open:
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

    def _has_tiny_chunks(self, data: bytes) -> bool:
        """Return whether a body comes in chunks so small that reading them delays all other clients."""
        if not (self._asking and self.cycle.more_body):
            return False
        chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        return chunked and len(_SMALL_CHUNK.findall(data)) * MIN_CHUNK_BYTES > len(data) + 64 * MIN_CHUNK_BYTES

    @property
    def _asking(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete


def _answer(status: str, message: str) -> bytes:
    """Return the bytes of an answer with an error, for connections whose request is not being handled."""
    body = json.dumps(error_body(int(status[:3]), message)).encode()
    head = (
        f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def open_file_limit() -> int:
    """Raise the number of files that this process may open to the system's limit, and return it."""
    try:
        import resource
    except ImportError:  # where the system has no such limit
        return 1 << 30
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return 1 << 30 if soft == hard else soft
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def room_for_connections(wanted: int | None) -> int:
    """Return how many connections may be open: `MAX_CONNECTIONS` unless the user wants another number.

    Fewer where too few files may be opened; where the user wants more than that, raise `ArgumentError`.
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
