"""Connections of clients: how many there may be, and how long each may keep the server waiting."""

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

__all__ = ["Connection", "Crowd", "open_file_limit", "room_for_connections"]

_LOG = logging.getLogger(__name__)
MOST = 1024  # connections, where there are files for them
SPARE_FILES = 64  # for what is opened later, and for connections on their way out
HEADERS = 10.0  # seconds in which a request's line and headers must have come
IDLE = 30.0  # seconds that a connection may wait for its next request
STALLED = 60.0  # seconds in which a client must accept something of its answer
PARTING = 1.0  # seconds in which a client that is turned away is told so
WRITE_BUFFER = 1 << 16  # bytes of an answer that wait for a client, beside those that the system keeps
READ_AT_ONCE = 1 << 13  # bytes, of which each may be a chunk of a body
CRUMB = 64  # bytes; a body in chunks that are smaller on average is refused, as each chunk costs about 10 us
_SMALL_CHUNK = re.compile(rb"\r\n0*[0-9a-fA-F]{1,2}(?:;[^\r\n]*)?\r\n")  # the size of a chunk below 256 bytes


class Crowd:
    """The connections of a server. Those that have asked for nothing make room for new ones."""

    def __init__(self, most: int):
        self.most = most
        self.open: set[Connection] = set()
        self._waiting: dict[Connection, float] = {}  # for a request, until when; who waits longest comes first
        self._stalled: dict[Connection, float] = {}  # with an answer that is not read, until when

    def admit(self, connection: "Connection") -> bool:
        """Take a connection in, if need be in the place of the one that has waited longest for a request."""
        if len(self.open) >= self.most:
            longest = next(iter(self._waiting), None)
            if longest is None:
                return False
            self.drop(longest)
        self.open.add(connection)
        return True

    def waits(self, connection: "Connection", seconds: float) -> None:
        self._waiting.pop(connection, None)
        self._waiting[connection] = time.monotonic() + seconds

    def asks(self, connection: "Connection") -> None:
        self._waiting.pop(connection, None)

    def stalls(self, connection: "Connection") -> None:
        self._stalled[connection] = time.monotonic() + STALLED

    def flows(self, connection: "Connection") -> None:
        self._stalled.pop(connection, None)

    def leave(self, connection: "Connection") -> None:
        for group in (self._waiting, self._stalled):
            group.pop(connection, None)
        self.open.discard(connection)

    def drop(self, connection: "Connection") -> None:
        """End a connection with what it has not read."""
        self.leave(connection)
        connection.transport.abort()

    def drop_all(self) -> None:
        for connection in list(self.open):
            self.drop(connection)

    async def watch(self) -> None:
        """Drop, for as long as this runs, whoever keeps the server waiting for too long."""
        while True:
            await asyncio.sleep(min(HEADERS, IDLE, STALLED, 10.0) / 10)
            now = time.monotonic()
            for group in (self._waiting, self._stalled):
                for late in [each for each, end in group.items() if end < now]:
                    self.drop(late)


class Connection(H11Protocol):
    """A connection that tells a `Crowd` whom it waits for. One too many is answered with 503 and closed."""

    def __init__(self, crowd: Crowd, **uvicorn: Any):
        super().__init__(**uvicorn)
        self._crowd, self._begun, self._refused = crowd, False, False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if not self._crowd.admit(self):
            self.transport, self._refused = transport, True
            self.loop.call_later(PARTING, transport.abort)
            return
        transport.set_write_buffer_limits(high=WRITE_BUFFER)
        if hasattr(transport, "max_size"):
            transport.max_size = READ_AT_ONCE
        super().connection_made(transport)
        self._crowd.waits(self, HEADERS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.leave(self)
        if not self._refused:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:  # answered once it has asked: whoever is told before that may not hear it
            if not self._begun:
                self.transport.write(_answer("503 Service Unavailable", "too many connections"))
                if self.transport.can_write_eof():
                    self.transport.write_eof()
            self._begun = True
            return
        if self._crumbles(data):
            self.transport.write(_answer("400 Bad Request", f"the body comes in chunks of less than {CRUMB} bytes"))
            self.transport.close()
            return
        if not self._begun and not self._asking:
            self._crowd.waits(self, HEADERS)
        self._begun = True
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self._asking:
            self._crowd.asks(self)

    def on_response_complete(self) -> None:
        self._begun = False
        if self in self._crowd.open:
            self._crowd.waits(self, IDLE)
        super().on_response_complete()

    def pause_writing(self) -> None:
        self._crowd.stalls(self)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._crowd.flows(self)
        super().resume_writing()

    def _crumbles(self, data: bytes) -> bool:
        """Whether a body comes in pieces so small that reading them holds everybody else up."""
        if not (self._asking and self.cycle.more_body):
            return False
        chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        return chunked and len(_SMALL_CHUNK.findall(data)) * CRUMB > len(data) + 64 * CRUMB

    @property
    def _asking(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete


def _answer(status: str, message: str) -> bytes:
    """Return an answer as it is sent, for where no request is being answered."""
    body = json.dumps(error_body(int(status[:3]), message)).encode()
    head = (
        f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def open_file_limit() -> int:
    """Raise how many files this process may open as far as the system lets it, and return that number."""
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


def room_for_connections(most: int | None) -> int:
    """Return how many connections may be open. most: what the user asks for, None for as many as are sensible.

    Raises `ArgumentError` where there are fewer files than the user asks for.
    """
    taken = len(os.listdir("/dev/fd")) if os.path.isdir("/dev/fd") else 0
    files = max(open_file_limit() - taken - SPARE_FILES, 4)
    if most is None:
        return min(MOST, files)
    if most > files:
        raise ArgumentError(
            f"--max-connections {most} needs more files than may be open: at most {files}; see ulimit -n"
        )
    return most
