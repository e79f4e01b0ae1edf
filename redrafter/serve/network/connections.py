"""Limit connections: how many are open, how long a request may take to arrive, and one request at a time on each.

A proxy, such as the nginx of examples/deploy, does more for strangers: it limits each address, and buffers heads,
bodies and answers.
"""

import asyncio
import json
import os
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from redrafter.errors import ArgumentError
from redrafter.serve.protocol.requests import error_body

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
        """Whether a whole request has arrived that has no whole answer yet."""
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
        """Reject what is no HTTP request. Two lengths of a body would let proxies split requests differently."""
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
        raise ArgumentError(
            f"--max-connections {wanted} needs more files than may be open: at most {files}; see ulimit -n"
        )
    return min(MAX_CONNECTIONS, files) if wanted is None else wanted
