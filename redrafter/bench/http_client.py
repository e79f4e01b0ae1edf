"""Send HTTP requests to a measured server with aiohttp, and describe failures.

The load generator must not limit the server, so the client's cost matters. Per chunk of a stream, aiohttp takes about
30 microseconds of processor time including the parsing of the event; code specialised for this kind of response takes
26, and httpx 90.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from aiohttp import (
    ClientError,
    ClientOSError,
    ClientPayloadError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    ServerDisconnectedError,
    TCPConnector,
    TraceConfig,
)

from redrafter.errors import ArgumentError

MAX_MESSAGE = 300  # characters of a server's error message that are kept
MAX_REQUEST_SECONDS = 3600.0  # a request that takes longer has failed
CONNECT_SECONDS = 10.0


class RequestFailedError(Exception):
    """A request failed or returned an invalid response; the message says why.

    `code` is the code of an error in OpenAI's format, such as `context_length_exceeded`; None if there is none.
    """

    def __init__(self, message: str, code: str | None = None):
        super().__init__(message)
        self.code = code


def server_url(url: str) -> str:
    """Return a server's URL without `/v1`, such as `http://127.0.0.1:8000`; raise `ArgumentError` if it is invalid."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError as error:
        raise ArgumentError(f"--url {url}: {error}") from error
    if not (known and url.isascii() and url.isprintable()) or {*"@ ?#"} & {*url}:
        raise ArgumentError(f"--url must be like http://127.0.0.1:8000, got {url!r}")
    return url.rstrip("/").removesuffix("/v1")


def open_session(key: str | None) -> ClientSession:
    """Open a session that reuses connections and sends an API key as a bearer token. Requires a running event loop.

    Sets `sent` of a request's `trace_request_ctx`, a `Completion`, when the request is sent.
    """

    async def note_sent(session: ClientSession, context: Any, params: Any) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx.sent = time.perf_counter()

    # Times count from when the request was sent, without the time to connect.
    trace = TraceConfig()
    trace.on_request_headers_sent.append(note_sent)
    # Compression would delay and merge the chunks of a stream.
    headers = {"User-Agent": "redrafter", "Content-Type": "application/json", "Accept-Encoding": "identity"}
    return ClientSession(
        # The load's concurrency is the limit, not aiohttp's default of 100 connections.
        connector=TCPConnector(limit=0),
        cookie_jar=DummyCookieJar(),
        headers=headers if key is None else headers | {"Authorization": f"Bearer {key}"},
        timeout=ClientTimeout(total=MAX_REQUEST_SECONDS, sock_connect=CONNECT_SECONDS),
        trace_configs=[trace],
    )


@asynccontextmanager
async def request(session: ClientSession, method: str, url: str, **arguments: Any) -> AsyncIterator[ClientResponse]:
    """Send a request with further `arguments` of aiohttp, and yield its response, to be read in the context.

    Raises:
        RequestFailedError: The response is incomplete, or its status is not 200.
    """
    try:
        async with session.request(method, url, allow_redirects=False, **arguments) as response:
            if response.status != 200:
                message, code = _read_error(await response.read())
                raise RequestFailedError(f"HTTP {response.status}: {message}", code)
            yield response
    except asyncio.TimeoutError as error:
        limit = CONNECT_SECONDS if isinstance(error, ClientError) else MAX_REQUEST_SECONDS
        raise RequestFailedError(f"not answered within {limit:g} s") from error
    except (ServerDisconnectedError, ClientPayloadError) as error:
        raise RequestFailedError("the server closed the connection before its answer had ended") from error
    except ClientOSError as error:
        raise RequestFailedError(f"the connection failed: {error.strerror or error}") from error
    except (ClientError, ValueError) as error:  # ValueError: a line that is too long
        raise RequestFailedError("the answer is not HTTP/1.1") from error


def _read_error(body: bytes) -> tuple[str, str | None]:
    """Return the message of a server's error, and its code or None."""
    text, code = body.decode(errors="replace"), None
    with suppress(ValueError, LookupError, TypeError):  # another server's error format, or an error of a proxy
        error = json.loads(text)["error"]
        text, code = str(error["message"]), error.get("code")
    return " ".join(text.split())[:MAX_MESSAGE] or "no message", code if isinstance(code, str) else None
