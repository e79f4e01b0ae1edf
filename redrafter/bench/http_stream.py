"""A connection to a server over HTTP/1.1, and events of a stream, read as they come.

A load generator must not be what limits a server. This is for one kind of request and answer only, and so takes a
fraction of a general client's processor time for each chunk of a stream.
"""

import asyncio
import json
import re
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

from redrafter.errors import ArgumentError

MAX_PIECE = 1 << 16  # bytes read at once from a body whose length is not given
MAX_MESSAGE = 300  # characters of a server's error message that are kept
CONNECT_SECONDS = 10.0

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class RequestFailedError(Exception):
    """A request got no answer, or one that cannot be used. The message says why.

    `code` is that of a server's error in OpenAI's form, such as `context_length_exceeded`; None where it has none.
    """

    def __init__(self, message: str, code: str | None = None):
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Address:
    """The address of a server."""

    url: str  # without `/v1`, such as `http://127.0.0.1:8000`
    host: str  # name or IP address
    port: int
    path: str  # what routes begin with, empty or such as `/proxy`
    tls: bool  # whether the server speaks https

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Return the address that a URL names, without `/v1`; raise `ArgumentError` if it names no server."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ArgumentError(f"--url {url}: {error}") from error
        known = parts.scheme in ("http", "https") and parts.hostname and url.isascii() and url.isprintable()
        if not known or "@" in parts.netloc or parts.query or parts.fragment or " " in url:
            raise ArgumentError(f"--url must be like http://127.0.0.1:8000, got {url!r}")
        tls, path = parts.scheme == "https", parts.path.rstrip("/").removesuffix("/v1")
        url = f"{parts.scheme}://{parts.netloc}{path}"
        return cls(url, str(parts.hostname), port or (443 if tls else 80), path, tls)


class Connection:
    """A connection to a server that is opened when needed and kept from one request to the next.

    An API key is sent as a bearer token. `sent_at` is when the last request was sent, by `time.perf_counter`.
    """

    def __init__(self, address: Address, key: str | None = None):
        self._address = address
        host = f"[{address.host}]" if ":" in address.host else address.host
        headers = [f"Host: {host}:{address.port}", "User-Agent: redrafter", "Content-Type: application/json"]
        headers += [] if key is None else [f"Authorization: Bearer {key}"]
        self._headers = "".join(f"{header}\r\n" for header in headers)
        self._streams: Streams | None = None
        self.sent_at = 0.0

    async def request(self, method: str, path: str, body: bytes, take: Callable[[bytes], None]) -> None:
        """Send a request, and give each piece of its answer's body to `take` as it comes; what that raises ends it.

        Raises:
            RequestFailedError: There is no whole answer, or its status is not 200.
        """
        kept = False
        try:
            reader, writer = await self._open()
            head = f"{method} {self._address.path}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
            self.sent_at = time.perf_counter()
            writer.write(head.encode("latin-1") + body)
            status, headers = await _read_head(reader)
            pieces: list[bytes] = []
            kept = await _read_body(reader, headers, take if status == 200 else pieces.append)
            if status != 200:
                message, code = _read_error(b"".join(pieces))
                raise RequestFailedError(f"HTTP {status}: {message}", code)
        except asyncio.IncompleteReadError as error:
            raise RequestFailedError("the server closed the connection before its answer had ended") from error
        except (ValueError, asyncio.LimitOverrunError) as error:
            raise RequestFailedError("the answer is not HTTP/1.1") from error
        except OSError as error:
            raise RequestFailedError(f"the connection failed: {error.strerror or error}") from error
        finally:
            if not kept:
                self.close()

    def close(self) -> None:
        """Close the connection, if one is open; the next request opens another."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _open(self) -> Streams:
        """Return the open connection, or a new one where there is none or the server has closed it."""
        if self._streams is not None and self._streams[0].at_eof():
            self.close()
        if self._streams is None:
            tls = _tls_context() if self._address.tls else None
            opening = asyncio.open_connection(self._address.host, self._address.port, ssl=tls)
            try:
                self._streams = await asyncio.wait_for(opening, CONNECT_SECONDS)
            except asyncio.TimeoutError as error:
                raise RequestFailedError(f"no connection within {CONNECT_SECONDS:g} s") from error
        return self._streams


_tls_context = lru_cache(ssl.create_default_context)  # which reads all certificates


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip().split("\r\n")
    status = re.match(r"HTTP/1\.[01] (\d{3})", first)
    if status is None:
        raise ValueError(first)
    pairs = (line.partition(":") for line in lines)
    return int(status[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str], take: Callable[[bytes], None]) -> bool:
    """Give the pieces of a body to `take`, and return whether the connection may be used for another request."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            take((await reader.readexactly(size + 2))[:-2])
        while await reader.readuntil(b"\r\n") != b"\r\n":
            pass  # headers may also follow a body
    elif "content-length" in headers:
        take(await reader.readexactly(int(headers["content-length"])))
    else:
        while piece := await reader.read(MAX_PIECE):
            take(piece)
        return False
    return headers.get("connection", "").lower() != "close"


def _read_error(body: bytes) -> tuple[str, str | None]:
    """Return the message of a server's error and its code, if it has one."""
    text, code = body.decode(errors="replace"), None
    with suppress(ValueError, LookupError, TypeError):  # an error of another server, or of a proxy before it
        error = json.loads(text)["error"]
        text, code = str(error["message"]), error.get("code")
    return " ".join(text.split())[:MAX_MESSAGE] or "no message", code if isinstance(code, str) else None


class EventLines:
    """Splits an event stream, which comes in pieces of any size, into the contents of its `data:` lines.

    Every line is an event of its own, as all servers of OpenAI's protocol send them.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the lines that end in this piece."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
