"""The application that clients talk to: it hands each request to a replica, and to another one if that is lost."""

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from fastapi.responses import Response
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from redrafter.serve.network.access import HEALTH_PATHS, AccessPolicy, Refusal, error_answer
from redrafter.serve.network.bodies import JsonRequest
from redrafter.serve.network.guards import add_guards
from redrafter.serve.protocol.requests import error_body
from redrafter.serve.replicas.affinity import SESSION_HEADER, routing_key
from redrafter.serve.replicas.call import AnswerPart, AnswerStart, HttpCall
from redrafter.serve.replicas.resumption import DivergedError, SentStream, can_resume

__all__ = ["create_router"]

_LOG = logging.getLogger(__name__)

WRITING_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
MAX_RETRIES = 2  # of a request whose replica is lost: more, and a request that ends engines would end all of them
HEALTH_SECONDS = 5.0  # in which some replica must answer
SEED_BITS = 61
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Ask = Callable[[HttpCall], AsyncGenerator[AnswerPart, None]]


def create_router(
    ask: Ask,
    metrics: Callable[[], Awaitable[bytes]],
    lost: tuple[type[Exception], ...],
    policy: AccessPolicy,
    max_body_bytes: int,
) -> ASGIApp:
    """Return the ASGI application.

    Args:
        ask: Sends a request to the replica of its key, and yields the answer.
        metrics: Returns the metrics of all replicas.
        lost: Errors that `ask` raises where the replica has ended before the answer has.
        policy: Which requests are accepted.
        max_body_bytes: Bytes that the body of a request may have.
    """
    app = Starlette(routes=[Mount("/", _Router(ask, metrics, lost))])
    add_guards(app, policy, max_body_bytes)
    return _without_request_id(app)


def _without_request_id(app: ASGIApp) -> ASGIApp:
    """Return an application that leaves the header with a request's id to Ray's proxy, which adds it anyway."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name, value) for name, value in message["headers"] if name != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive, send_without)

    return answer


class _Router:
    """Hands requests to replicas. Arguments are those of `create_router`."""

    def __init__(self, ask: Ask, metrics: Callable[[], Awaitable[bytes]], lost: tuple[type[Exception], ...]):
        self._ask, self._metrics, self._lost = ask, metrics, lost

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        try:
            if scope["path"] == "/metrics" and scope["method"] == "GET":
                text = await self._metrics()
                return await Response(text, media_type=METRICS_TYPE)(scope, receive, send)
            body, document = await _read(scope, receive)
        except Refusal as refusal:
            return await error_answer(refusal)(scope, receive, send)
        key = routing_key(dict(scope["headers"]).get(SESSION_HEADER), document)
        call = HttpCall.of(scope, body, key, scope["facts"]["id"])
        answering = _Answer(call, can_resume(scope["path"], document), send).relay(self._ask, self._lost)
        if scope["path"] not in HEALTH_PATHS:
            return await answering
        try:
            await asyncio.wait_for(answering, HEALTH_SECONDS)
        except asyncio.TimeoutError:
            await Response(status_code=503)(scope, receive, send)


async def _read(scope: Scope, receive: Receive) -> tuple[bytes, Mapping[str, Any]]:
    """Return the body of a request as replicas get it, and its value, which is empty where it is no JSON object.

    A request that writes gets a seed if it has none, so that every replica writes the same text.
    """
    request = JsonRequest(scope, receive)
    body = await request.body()
    if scope["method"] != "POST":
        return body, {}
    try:
        document = await request.json()
    except json.JSONDecodeError:  # the replica says so
        return body, {}
    if not isinstance(document, dict):
        return body, {}
    if scope["path"] in WRITING_PATHS and document.get("seed") is None:
        document["seed"] = secrets.randbits(SEED_BITS)
        body = json.dumps(document).encode()
    return body, document


class _Answer:
    """The answer to one request, on its way from replicas to the client."""

    def __init__(self, call: HttpCall, resumable: bool, send: Send):
        self._call, self._resumable, self._send = call, resumable, send
        self._stream = SentStream() if resumable else None
        self._begun = False  # the client has got the status

    async def relay(self, ask: Ask, lost: tuple[type[Exception], ...]) -> None:
        """Send the answer of a replica, and what is missing of it from another one if that is lost."""
        for attempt in range(MAX_RETRIES + 1):
            try:
                return await self._relay_once(ask)
            except DivergedError:
                _LOG.warning(
                    "a lost replica's text goes on otherwise on another one: --batch-invariant makes them alike"
                )
                return await self._fail(
                    "the replica that wrote this text was lost, and another one writes another text"
                )
            except lost as error:
                _LOG.warning("a replica was lost while it answered %s: %s", self._call.scope["path"], _reason(error))
                if attempt == MAX_RETRIES or (self._begun and not self._resumable):
                    return await self._fail("the replica that wrote this answer was lost: send the request again")
                if self._stream is not None:
                    self._stream.resume()

    async def _relay_once(self, ask: Ask) -> None:
        """Send the answer of one replica: a stream as it comes, another answer when it is whole."""
        start, whole, streaming = AnswerStart(500, []), [], False
        async with contextlib.aclosing(ask(self._call)) as parts:
            async for part in parts:
                if part.start is not None:
                    start, streaming = part.start, _is_stream(part.start)
                if not streaming:
                    whole.append(part.body)
                elif body := part.body if self._stream is None else self._stream.push(part.body):
                    await self._send_start(start)
                    await self._send({"type": "http.response.body", "body": body, "more_body": True})
        if not streaming and self._begun:
            return await self._fail("the replica that wrote this text was lost, and no other one takes it on now")
        await self._send_start(start)
        await self._send({"type": "http.response.body", "body": b"".join(whole)})

    async def _send_start(self, start: AnswerStart) -> None:
        if not self._begun:
            self._begun = True
            await self._send({"type": "http.response.start", "status": start.status, "headers": start.headers})

    async def _fail(self, message: str) -> None:
        """Tell the client that its answer has ended before its time, within the stream if that has begun."""
        body = json.dumps(error_body(503, message)).encode()
        if self._begun:
            await self._send({"type": "http.response.body", "body": b"data: " + body + b"\n\n"})
            return
        headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
        await self._send_start(AnswerStart(503, [*headers, (b"content-length", b"%d" % len(body))]))
        await self._send({"type": "http.response.body", "body": body})


def _is_stream(start: AnswerStart) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream") for name, value in start.headers
    )


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
