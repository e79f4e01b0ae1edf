"""Transfer a request from a router to a replica, where an ASGI application answers it in parts."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message, Scope

_LOG = logging.getLogger(__name__)
Headers = list[tuple[bytes, bytes]]
LEAVING_SECONDS = 5.0  # time for an application to end after its client disconnects


@dataclass(frozen=True)
class HttpCall:
    """A client's request to forward. Calls with the same key go to the same replica; None allows any replica."""

    scope: dict[str, Any]
    body: bytes
    key: str | None = None

    @classmethod
    def from_scope(cls, scope: Scope, body: bytes, key: str | None, request_id: str) -> "HttpCall":
        """Create the call for an ASGI request, with the body to forward and the request id for the log."""
        sent = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "server")
        replaced = (b"content-length", b"transfer-encoding", b"x-request-id")
        headers = [(name, value) for name, value in scope["headers"] if name not in replaced]
        headers += [(b"content-length", b"%d" % len(body)), (b"x-request-id", request_id.encode())]
        # ASGI 2.3 signals a disconnect with a message; later versions raise an error on send instead.
        asgi = {"version": "3.0", "spec_version": "2.3"}
        kept = {name: scope[name] for name in sent if name in scope}
        return cls(kept | {"asgi": asgi, "headers": headers, "client": scope.get("client")}, body, key)


class AnswerStart(NamedTuple):
    """Status and headers of an answer."""

    status: int
    headers: Headers


class AnswerPart(NamedTuple):
    """A part of an answer: bytes of its body and, in the first part, its start."""

    start: AnswerStart | None
    body: bytes


class ReplicaLostError(Exception):
    """Raised when a replica's engine has ended; another replica can complete the answer."""


async def answer_parts(
    app: ASGIApp, call: HttpCall, pause: Callable[[], float] = lambda: 0.0
) -> AsyncGenerator[AnswerPart, None]:
    """Yield an application's answer to a call; each part has all that was sent since the previous one.

    Closing this iterator early signals a disconnect to the application.

    Args:
        app: The application.
        call: The request.
        pause: Returns the seconds between a part and the next one, except after the part with the start of the answer
            and before the last one.
    """
    request: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]
    starts: list[AnswerStart] = []  # at most one, not yielded yet
    body: list[bytes] = []  # chunks of the body, not yielded yet
    whole = False  # whether the last part of the body was sent
    news, left = asyncio.Event(), asyncio.Event()

    async def receive() -> Message:
        if request:
            return request.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal whole
        if message["type"] == "http.response.start":
            headers = [(bytes(name), bytes(value)) for name, value in message["headers"]]
            starts.append(AnswerStart(message["status"], headers))
        elif message["type"] == "http.response.body":
            body.append(message.get("body", b""))
            whole = not message.get("more_body", False)
        news.set()

    running = asyncio.ensure_future(app(dict(call.scope), receive, send))
    running.add_done_callback(lambda _: news.set())
    try:
        while not running.done() or starts or body:
            await news.wait()
            news.clear()
            if starts or body:
                # Chunks that came meanwhile are joined, since each part is a message between processes.
                part = AnswerPart(starts.pop() if starts else None, b"".join(body))
                body.clear()
                yield part
                if part.start is None and (seconds := pause()) > 0:
                    await asyncio.wait([running], timeout=seconds)
        # An answer that was cut off must raise, or the router would take it for complete.
        if not whole or running.cancelled():
            running.result()
        elif (error := running.exception()) is not None:  # Starlette answers with 500, then raises the error again
            _LOG.error("%s %s failed", call.scope["method"], call.scope["path"], exc_info=error)
    finally:
        # The app sees a disconnect first, so that it can cancel its sequences in the engine.
        left.set()
        if not running.done():
            await asyncio.wait([running], timeout=LEAVING_SECONDS)
            running.cancel()
