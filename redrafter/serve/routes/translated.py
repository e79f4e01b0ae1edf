"""Shared code of other protocols' routes: translate requests to chats, and chat answers back.

A route translates its request into the fields of a `ChatRequest`, and its `PartWriter` converts the chat's answer to
the protocol's parts: thoughts, texts and calls, as a whole or as the events of a stream.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from redrafter.serve.protocol.requests import ChatRequest, SharedFields

Event = dict[str, Any]
Kind = Literal["thought", "text", "call"]


def chat_request(fields: dict[str, Any], request: BaseModel | None = None) -> ChatRequest:
    """Return the chat request with some fields, or raise `RequestValidationError`.

    The `SharedFields` of another protocol's `request` are copied to it.
    """
    if isinstance(request, SharedFields):
        fields = {name: getattr(request, name) for name in SharedFields.model_fields} | fields
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error


class PartWriter(ABC):
    """Converts a chat's answer to consecutive parts: thoughts, texts and calls.

    Subclasses define the parts of their protocol, and yield the events of a stream for them.

    Attributes:
        done: The parts that are complete.
        finish: OpenAI's finish reason of the chat; None until it has ended.
        stop: The stop string that ended it, if one did.
        reported: Latest `usage` and `metrics` of the chat.
    """

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self.finish: str | None = None
        self.stop: str | None = None
        self.reported: dict[str, Any] = {}
        self._kind: Kind | None = None  # of the open part
        self._pieces: list[str] = []  # of the open part
        self._call: int | None = None  # the number of the open call

    @property
    def _written(self) -> str:
        """Text of the open part."""
        return "".join(self._pieces)

    @abstractmethod
    def _begin(self, kind: Kind, call: dict[str, Any]) -> Iterator[Event]:
        """Begin a part. `call` has the id and the function of a call."""

    @abstractmethod
    def _tell(self, piece: str) -> Iterator[Event]:
        """Yield the events for text that the open part has gained."""

    @abstractmethod
    def _end(self, cut: bool) -> Iterator[Event]:
        """Complete the open part, whose text is `_written`, and append it to `done`; `cut` marks it incomplete."""

    def translate(self, answer: dict[str, Any]) -> Iterator[Event]:
        """Process a chunk of a chat's stream, or a whole answer, and yield events."""
        self.reported |= {name: answer[name] for name in ("usage", "metrics") if answer.get(name) is not None}
        for choice in answer["choices"]:
            self.finish = choice["finish_reason"] or self.finish
            self.stop = choice.get("stop_reason") or self.stop
            delta = choice.get("delta")
            # A complete answer is read as a stream of one chunk.
            if delta is None:
                message = choice["message"]
                calls = [call | {"index": index} for index, call in enumerate(message.get("tool_calls") or ())]
                delta = message | {"tool_calls": calls}
            yield from self._add(delta)

    def translate_whole(self, answer: dict[str, Any]) -> None:
        """Process a whole answer, whose parts are then `done`."""
        for _ in (*self.translate(answer), *self.close()):
            pass

    def _add(self, delta: dict[str, Any]) -> Iterator[Event]:
        for kind, piece in (("thought", delta.get("reasoning_content")), ("text", delta.get("content"))):
            if piece:
                yield from self._extend(kind, piece)  # type: ignore[arg-type]
        for call in delta.get("tool_calls") or ():
            if self._call != call["index"]:
                yield from self._open("call", call)
                self._call = call["index"]
            if arguments := call["function"].get("arguments"):
                yield from self._extend("call", arguments)

    def _extend(self, kind: Kind, piece: str) -> Iterator[Event]:
        if kind != self._kind:
            yield from self._open(kind)
        self._pieces.append(piece)
        yield from self._tell(piece)

    def _open(self, kind: Kind, call: dict[str, Any] | None = None) -> Iterator[Event]:
        yield from self._close(False)
        self._kind = kind
        yield from self._begin(kind, call or {})

    def _close(self, cut: bool) -> Iterator[Event]:
        if self._kind is not None:
            yield from self._end(cut)
            self._kind, self._pieces, self._call = None, [], None

    def close(self) -> Iterator[Event]:
        """Complete the last part at the end of an answer; an answer without parts gets an empty text."""
        if self._kind is None and not self.done:
            yield from self._open("text")
        yield from self._close(self.finish == "length")


async def format_events(events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
    """Format events as server-sent events named after their types, and close `events` at the end."""
    async with aclosing(events):  # type: ignore[type-var]
        async for event in events:
            yield b"event: %b\ndata: %b\n\n" % (event["type"].encode(), to_json(event))
