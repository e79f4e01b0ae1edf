"""A server of completions whose answers a test makes up: bytes, pauses, and connections that are dropped."""

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

DROP = None  # in place of bytes: the connection is closed here
MODELS = {"data": [{"id": "stub", "owned_by": "nobody"}, {"id": "other"}]}
Part = bytes | float | None  # floats are pauses in seconds


def reply(body: bytes, status: int = 200) -> list[Part]:
    """A whole answer."""
    return [b"HTTP/1.1 %d Whatever\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body]


def stream(*parts: Part) -> list[Part]:
    """An answer in chunks, one for each part that is bytes."""
    framed = [b"%x\r\n%s\r\n" % (len(part), part) if isinstance(part, bytes) else part for part in parts]
    return [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *framed, b"0\r\n\r\n"]


def event(document: Any) -> bytes:
    """An event of a stream."""
    return f"data: {json.dumps(document)}\n\n".encode()


def chunk(text: str) -> bytes:
    """An event with a piece of a text."""
    return event({"choices": [{"index": 0, "text": text, "finish_reason": None}], "usage": None})


def usage(prompt: int, completion: int) -> bytes:
    """The event that tells the tokens of an answer."""
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


END = b"data: [DONE]\n\n"


def completion(texts: Sequence[str], pause: float = 0.0, prompt: int = 3) -> list[Part]:
    """A stream of one token a chunk, each after a pause."""
    parts: list[Part] = [part for text in texts for part in (pause, chunk(text))]
    return stream(*parts, usage(prompt, len(texts)), END)


class StubServer:
    """A server in a thread, which answers the bodies of `/v1/completions` by a function; it keeps what it is sent."""

    def __init__(self, answer: Callable[[dict[str, Any]], list[Part]], version: list[Part] | None = None):
        self._answer, self._version = answer, version or reply(b"no such route", 404)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.connections = self.most_at_once = self._at_once = 0
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "StubServer":
        self._thread.start()
        assert self._listening.wait(300)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join(timeout=300)

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._main = asyncio.get_running_loop(), asyncio.current_task()
        server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._listening.set()
        await asyncio.Event().wait()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._handle_request(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client has gone, or the test has ended
        finally:
            writer.close()

    async def _handle_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer a request, and return whether the connection stays open."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        self.headers.append(head)
        lengths = (int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("content-length"))
        body = await reader.readexactly(next(lengths, 0))
        path = head.split()[1]
        if path == "/v1/models":
            return await self._send(writer, reply(json.dumps(MODELS).encode()))
        if path == "/version":
            return await self._send(writer, self._version)
        asked = json.loads(body)
        self.bodies.append(asked)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            return await self._send(writer, self._answer(asked))
        finally:
            self._at_once -= 1

    async def _send(self, writer: asyncio.StreamWriter, parts: list[Part]) -> bool:
        for part in parts:
            if part is DROP:
                return False
            if isinstance(part, float):
                await asyncio.sleep(part)
            else:
                writer.write(part)
                await writer.drain()
        return True
