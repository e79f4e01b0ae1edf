"""Bodies of requests: how large they may be, and how long reading them may hold everybody else up.

`json.loads` and the check of what it makes are single calls in which nothing else runs, `/health` neither. What they
cost goes by how many values a body holds rather than by its bytes, so that both are limited before anything is parsed,
and large bodies are parsed one at a time, with as long a pause behind each as it took.
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

from redrafter.serve.network.guard import Refusal, error_answer

__all__ = ["BodyLimits", "JsonRoute"]

SLOWEST = 30.0  # seconds in which a body must have come
SMALL = 1 << 16  # bytes of a body that is parsed in a few milliseconds at most, and need not wait for others
LOOK = 0.01  # seconds after which a body that waits for its turn looks again
TOGETHER = 256 << 20  # bytes of larger bodies that are held at once
# Of a body of so many bytes at most, one in so many may be
VALUES = 8  # a comma: there is about one for every value
GROUPS = 32  # [, { or a colon: lists, objects and their fields cost several times what a number does
EXPONENTS = 128  # an exponent: a number with one costs most
_ALIKE = bytes.maketrans(b"123456789E", b"000000000e")  # in which every exponent begins with 0e
_PAIR = re.compile(rb"(?i)\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}")  # one character, as two escapes
_LONE = re.compile(rb"(?i)\\ud[89a-f]")


class BodyLimits:
    """Around an application: turns away bodies that are too long, come too slowly or hold too much."""

    def __init__(self, app: ASGIApp, longest: int):
        self.app, self.longest = app, longest
        self._held = 0  # bytes of larger bodies
        self._busy_until = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        body = _Body(self, receive)
        scope["body"] = body
        said = dict(scope["headers"]).get(b"content-length", b"")
        try:
            body.check_length(int(said) if said.isdigit() else 0)
        except Refusal as refusal:
            return await error_answer(refusal)(scope, receive, send)
        try:
            await self.app(scope, body.receive, send)
        finally:
            body.release()

    def hold(self, size: int) -> None:
        """Count bytes of a larger body, where there is room for them."""
        if self._held + size > TOGETHER:
            raise Refusal(503, "too many large bodies at once", headers={"Retry-After": "1"})
        self._held += size

    def release(self, size: int) -> None:
        self._held -= size

    async def parse(self, body: bytes, parse: Callable[[bytes], Any]) -> Any:
        """Return what a body holds. Of larger ones one is parsed at a time."""
        if len(body) <= SMALL:
            return parse(body)
        while (left := self._busy_until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, LOOK))
        self._busy_until, began = math.inf, time.monotonic()
        try:
            check_structure(body, self.longest)
            return parse(body)
        finally:
            # The check of the fields follows at once; what is called here runs only after it.
            asyncio.get_running_loop().call_soon(self._pause, began)

    def _pause(self, began: float) -> None:
        now = time.monotonic()
        self._busy_until = now + (now - began)


class _Body:
    """One request's body on its way."""

    def __init__(self, limits: BodyLimits, receive: Receive):
        self.limits, self._receive = limits, receive
        self._read = self._held = 0
        self._whole = False
        self._deadline = asyncio.get_running_loop().time() + SLOWEST

    def check_length(self, length: int) -> None:
        if length > self.limits.longest:
            raise Refusal(413, f"the body is longer than {self.limits.longest} bytes")

    async def receive(self) -> Message:
        if self._whole:
            return await self._receive()
        left = self._deadline - asyncio.get_running_loop().time()
        try:
            message = await asyncio.wait_for(self._receive(), max(left, 0.01))
        except asyncio.TimeoutError:
            raise Refusal(408, f"the body did not come within {SLOWEST:g} s") from None
        size = len(message.get("body", b""))
        self._read += size
        self._whole = not message.get("more_body", False)
        self.check_length(self._read)
        if self._read > SMALL:
            self.limits.hold(size)
            self._held += size
        return message

    def release(self) -> None:
        """Say that the bytes are held no longer."""
        self.limits.release(self._held)
        self._held = 0


def check_structure(body: bytes, longest: int) -> None:
    """Raise `Refusal` for a body that holds too many values, without parsing it.

    Characters within strings count too: telling them apart would cost more than it is worth.

    longest: bytes that a body may have, by which the counts go.
    """
    if (count := body.count(b",")) > longest // VALUES:
        raise Refusal(413, f"the body holds {count} commas; at most {longest // VALUES}")
    if (count := sum(map(body.count, (b"[", b"{", b":")))) > longest // GROUPS:
        raise Refusal(413, f"the body holds {count} of the characters [, {{ and :; at most {longest // GROUPS}")
    if (count := body.translate(_ALIKE).count(b"0e")) > longest // EXPONENTS:
        raise Refusal(413, f"the body holds {count} numbers with exponents; at most {longest // EXPONENTS}")


def _loads(body: bytes) -> Any:
    """Return what a body says; `json.JSONDecodeError` is left to the application."""
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


class _JsonRequest(Request):
    """A request whose body is parsed in its turn."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body: _Body = self.scope["body"]
            self._json = await body.limits.parse(await self.body(), _loads)
            self._body = b""  # it may be large, and a stream may last
            body.release()
        return self._json


class JsonRoute(APIRoute):
    """A route whose bodies are parsed under `BodyLimits`."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle
