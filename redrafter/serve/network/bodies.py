"""Bodies of requests: how large they may be, and how long parsing them may delay other requests.

`json.loads` and the validation of its result are single calls during which the event loop serves nothing else, not even
`/health`. Their duration depends on the number of values in a body rather than on its bytes, so both are limited before
anything is parsed, and large bodies are parsed one at a time, each followed by a pause as long as its parsing took.
"""

import asyncio
import json
import math
import re
import time
from collections.abc import Callable
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from redrafter.serve.network.access import Refusal, error_answer

__all__ = ["BodyLimits", "JsonRequest", "JsonRoute"]

BODY_SECONDS = 30.0  # in which a body must arrive
SMALL_BODY_BYTES = 1 << 16  # of a body that is parsed in a few milliseconds, and need not wait for others
POLL_SECONDS = 0.01  # after which a body that waits for its turn looks again
MAX_LARGE_BODIES_BYTES = 256 << 20  # of larger bodies that are held at once
# Of the bytes that a body may have, one in so many may be
BYTES_PER_COMMA = 8  # a comma, of which there is about one for each value
BYTES_PER_CONTAINER = 32  # [, { or a colon: lists, objects and their fields take several times as long as a number
BYTES_PER_EXPONENT = 128  # an exponent: numbers with one take longest
_ALIKE = bytes.maketrans(b"123456789E", b"000000000e")  # makes every exponent begin with 0e
_PAIR = re.compile(rb"(?i)\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}")  # one character, as two escapes
_LONE = re.compile(rb"(?i)\\ud[89a-f]")


class BodyLimits:
    """ASGI middleware that refuses bodies that are too long, arrive too slowly or hold too many values."""

    def __init__(self, app: ASGIApp, max_bytes: int):
        self.app, self.max_bytes = app, max_bytes
        self._held_bytes = 0  # of larger bodies
        self._busy_until = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request under the limits."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        body = _Body(self, receive)
        scope["body"] = body
        length = dict(scope["headers"]).get(b"content-length", b"")
        try:
            body.check_length(int(length) if length.isdigit() else 0)
        except Refusal as refusal:
            return await error_answer(refusal)(scope, receive, send)

        async def answer(message: Message) -> None:
            body.release()  # not before: what waits for its turn, as images do, still holds the body
            await send(message)

        try:
            await self.app(scope, body.receive, answer)
        finally:
            body.release()

    def hold(self, size: int) -> None:
        """Count bytes of a larger body, or refuse them if too many are held."""
        if self._held_bytes + size > MAX_LARGE_BODIES_BYTES:
            raise Refusal(503, "too many large bodies at once", headers={"Retry-After": "1"})
        self._held_bytes += size

    def release(self, size: int) -> None:
        """Uncount bytes of a larger body."""
        self._held_bytes -= size

    async def parse(self, body: bytes, parse: Callable[[bytes], Any]) -> Any:
        """Return the value of a body, of larger bodies one at a time."""
        if len(body) <= SMALL_BODY_BYTES:
            return parse(body)
        while (left := self._busy_until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, POLL_SECONDS))
        self._busy_until, began = math.inf, time.monotonic()
        try:
            check_structure(body, self.max_bytes)
            return parse(body)
        finally:
            # The fields are validated right after this; the call runs only after that.
            asyncio.get_running_loop().call_soon(self._pause, began)

    def _pause(self, began: float) -> None:
        now = time.monotonic()
        self._busy_until = now + (now - began)


class _Body:
    """The body of one request, while it arrives."""

    def __init__(self, limits: BodyLimits, receive: Receive):
        self.limits, self._receive = limits, receive
        self._read = self._held = 0
        self._whole = False
        self._deadline = asyncio.get_running_loop().time() + BODY_SECONDS

    def check_length(self, length: int) -> None:
        """Refuse a body of so many bytes if it is too long."""
        if length > self.limits.max_bytes:
            raise Refusal(413, f"the body is longer than {self.limits.max_bytes} bytes")

    async def receive(self) -> Message:
        """Return the next message of the request, while its body is within the limits."""
        if self._whole:
            return await self._receive()
        left = self._deadline - asyncio.get_running_loop().time()
        try:
            message = await asyncio.wait_for(self._receive(), max(left, 0.01))
        except asyncio.TimeoutError:
            raise Refusal(408, f"the body did not come within {BODY_SECONDS:g} s") from None
        size = len(message.get("body", b""))
        self._read += size
        self._whole = not message.get("more_body", False)
        self.check_length(self._read)
        if self._read > SMALL_BODY_BYTES:
            self.limits.hold(size)
            self._held += size
        return message

    def release(self) -> None:
        """Uncount the bytes of the body, which are held no longer."""
        self.limits.release(self._held)
        self._held = 0


def check_structure(body: bytes, max_bytes: int) -> None:
    """Raise `Refusal` for a body that holds too many values, without parsing it.

    Characters within strings count too: telling them apart would take longer than it saves.

    Args:
        body: The body.
        max_bytes: Bytes that a body may have; the limits are in proportion to it.
    """
    if (count := body.count(b",")) > max_bytes // BYTES_PER_COMMA:
        raise Refusal(413, f"the body holds {count} commas; at most {max_bytes // BYTES_PER_COMMA}")
    if (count := sum(map(body.count, (b"[", b"{", b":")))) > max_bytes // BYTES_PER_CONTAINER:
        raise Refusal(
            413, f"the body holds {count} of the characters [, {{ and :; at most {max_bytes // BYTES_PER_CONTAINER}"
        )
    if (count := body.translate(_ALIKE).count(b"0e")) > max_bytes // BYTES_PER_EXPONENT:
        raise Refusal(413, f"the body holds {count} numbers with exponents; at most {max_bytes // BYTES_PER_EXPONENT}")


def _loads(body: bytes) -> Any:
    """Return the value of a JSON body; `json.JSONDecodeError` is left to the application."""
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise Refusal(400, "the body is not UTF-8") from None
    if b"\\ud" in body.lower() and _LONE.search(_PAIR.sub(b"-", body.replace(b"\\\\", b"-"))):
        raise Refusal(400, "the body holds half a character: a surrogate that stands alone")
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise Refusal(400, "the body is nested too deeply") from None
    except ValueError:  # Python reads no number of so many digits
        raise Refusal(400, "the body holds a number of too many digits") from None


def _refuse_constant(name: str) -> None:
    raise Refusal(400, f"the body is no JSON: {name} is no number there")


class JsonRequest(Request):
    """A request whose body is parsed under `BodyLimits`."""

    async def json(self) -> Any:
        """Return the value of the body."""
        if not hasattr(self, "_json"):
            body: _Body = self.scope["body"]
            self._json = await body.limits.parse(await self.body(), _loads)
            self._body = b""  # it may be large, and a stream may last
        return self._json


class JsonRoute(APIRoute):
    """A route whose bodies are parsed under `BodyLimits`."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        """Return a handler that parses bodies under `BodyLimits`."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handle
