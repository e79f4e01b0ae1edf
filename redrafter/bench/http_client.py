"""Requests to a server that is measured, over HTTP with aiohttp, and why one failed.

A load generator must not be what limits a server, so the client matters. Per chunk of a stream, aiohttp takes about 30
microseconds of processor time with the parsing of the event, and code written for this one kind of answer 26; httpx
alone takes 90.
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
    """A request got no answer, or one that cannot be used. The message says why.

    `code` is that of a server's error in OpenAI's form, such as `context_length_exceeded`; None where it has none.
    """

    def __init__(self, message: str, code: str | None = None):
        super().__init__(message)
        self.code = code


def server_url(url: str) -> str:
    """Return a server's URL without `/v1`, such as `http://127.0.0.1:8000`; raise `ArgumentError` if it names none."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError as error:
        raise ArgumentError(f"--url {url}: {error}") from error
    if not (known and url.isascii() and url.isprintable()) or {*"@ ?#"} & {*url}:
        raise ArgumentError(f"--url must be like http://127.0.0.1:8000, got {url!r}")
    return url.rstrip("/").removesuffix("/v1")


def open_session(key: str | None) -> ClientSession:
    """Return a session whose connections are kept from one request to the next; an API key is sent as a bearer token.

    A request's `trace_request_ctx`, a `Completion`, learns when the request is sent. For use in a running loop.
    """

    async def note_sent(session: ClientSession, context: Any, params: Any) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx.sent = time.perf_counter()

    trace = TraceConfig()
    trace.on_request_headers_sent.append(note_sent)
    headers = {"User-Agent": "redrafter", "Content-Type": "application/json", "Accept-Encoding": "identity"}
    return ClientSession(
        connector=TCPConnector(limit=0),
        cookie_jar=DummyCookieJar(),
        headers=headers if key is None else headers | {"Authorization": f"Bearer {key}"},
        timeout=ClientTimeout(total=MAX_REQUEST_SECONDS, sock_connect=CONNECT_SECONDS),
        trace_configs=[trace],
    )


@asynccontextmanager
async def request(session: ClientSession, method: str, url: str, **arguments: Any) -> AsyncIterator[ClientResponse]:
    """Send a request with further `arguments` of aiohttp, and yield its answer, to be read in the context.

    Raises:
        RequestFailedError: There is no whole answer, or its status is not 200.
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
    """Return the message of a server's error and its code, if it has one."""
    text, code = body.decode(errors="replace"), None
    with suppress(ValueError, LookupError, TypeError):  # an error of another server, or of a proxy before it
        error = json.loads(text)["error"]
        text, code = str(error["message"]), error.get("code")
    return " ".join(text.split())[:MAX_MESSAGE] or "no message", code if isinstance(code, str) else None
