"""One request to an ASGI application in the same process, and its answer in parts."""

import asyncio
from collections.abc import AsyncGenerator

from starlette.types import ASGIApp, Message

from redrafter.serve.replicas.call import AnswerPart, AnswerStart, HttpCall

__all__ = ["answer_parts"]

LEAVING_SECONDS = 5.0  # in which an application must have ended once it was told that its client has left


async def answer_parts(app: ASGIApp, call: HttpCall) -> AsyncGenerator[AnswerPart, None]:
    """Yield what an application answers to a call, as much at once as it has sent since the last part.

    Closing this iterator early tells the application that its client has left.

    Args:
        app: The application.
        call: The request.
    """
    exchange = _Exchange(call.body)
    running = asyncio.ensure_future(app(dict(call.scope), exchange.receive, exchange.send))
    running.add_done_callback(lambda _: exchange.news.set())
    try:
        while not running.done() or exchange.has_news:
            await exchange.news.wait()
            exchange.news.clear()
            if exchange.has_news:
                yield exchange.take()
        running.result()
    finally:
        exchange.left.set()
        if not running.done():
            await asyncio.wait([running], timeout=LEAVING_SECONDS)
            running.cancel()


class _Exchange:
    """The two ends of a request that an application is called with."""

    def __init__(self, body: bytes):
        self._request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self._start: AnswerStart | None = None
        self._body: list[bytes] = []
        self.news, self.left = asyncio.Event(), asyncio.Event()

    async def receive(self) -> Message:
        """Return the whole body, and after that, once the client has left, that it has."""
        if self._request:
            return self._request.pop()
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Keep what the application sends."""
        if message["type"] == "http.response.start":
            self._start = AnswerStart(
                message["status"], [(bytes(name), bytes(value)) for name, value in message["headers"]]
            )
        elif message["type"] == "http.response.body":
            self._body.append(message.get("body", b""))
        self.news.set()

    @property
    def has_news(self) -> bool:
        """Tell whether the application has sent anything since the last part was taken."""
        return self._start is not None or bool(self._body)

    def take(self) -> AnswerPart:
        """Return what the application has sent since the last call."""
        part = AnswerPart(self._start, b"".join(self._body))
        self._start, self._body = None, []
        return part
