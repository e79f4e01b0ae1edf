"""Make the typed events of `/v1/responses` from the chunks of a chat's stream."""

import json
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

from redrafter.serve.protocol.requests import ApiError

__all__ = ["call_item", "format_events", "message_item", "reasoning_item", "response_events", "responses_usage"]

Event = dict[str, Any]


def message_item(text: str | None, status: str) -> dict[str, Any]:
    """Return a message item of the assistant. A text of None makes one without content."""
    content = [] if text is None else [_text_part(text)]
    return {"id": _new_id("msg"), "type": "message", "role": "assistant", "status": status, "content": content}


def reasoning_item(text: str | None, status: str) -> dict[str, Any]:
    """Return an item for thoughts of the assistant. A text of None makes one without content."""
    content = [] if text is None else [_thought_part(text)]
    return {"id": _new_id("rs"), "type": "reasoning", "status": status, "summary": [], "content": content}


def call_item(call_id: str, name: str, arguments: str, status: str = "completed") -> dict[str, Any]:
    """Return an item for a call of a function."""
    item = {"id": _new_id("fc"), "type": "function_call", "status": status}
    return item | {"call_id": call_id, "name": name, "arguments": arguments}


def responses_usage(chat: dict[str, Any]) -> dict[str, Any]:
    """Return the usage of a chat answer under the names of the Responses protocol."""
    cached = chat["prompt_tokens_details"]["cached_tokens"]
    reasoning = (chat.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": chat["total_tokens"],
    }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _thought_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class ItemWriter:
    """Writes the items of one response. Each method yields the events for what it does.

    Attributes:
        done: Items that are complete.
    """

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._written = ""  # of the open item
        self._call: int | None = None  # the number of the open call

    @property
    def empty(self) -> bool:
        """Whether no item was begun."""
        return self._open is None and not self.done

    @property
    def _kind(self) -> str | None:
        return None if self._open is None else str(self._open["type"])

    def add_text(self, delta: str) -> Iterator[Event]:
        """Append to the open message, or begin one."""
        if self._kind != "message":
            yield from self.close()
            yield from self._begin(message_item(None, "in_progress"))
            yield self._content_event("response.content_part.added", part=_text_part(""))
        if delta:
            self._written += delta
            yield self._content_event("response.output_text.delta", delta=delta, logprobs=[])

    def add_thought(self, delta: str) -> Iterator[Event]:
        """Append to the open thoughts, or begin some."""
        if self._kind != "reasoning":
            yield from self.close()
            yield from self._begin(reasoning_item(None, "in_progress"))
        self._written += delta
        yield self._content_event("response.reasoning_text.delta", delta=delta)

    def add_call(self, delta: dict[str, Any]) -> Iterator[Event]:
        """Append to the open call, or begin the next one. `delta` is an entry of a chat chunk's `tool_calls`."""
        function = delta["function"]
        if self._open is None or self._call != delta["index"]:
            yield from self.close()
            yield from self._begin(call_item(delta["id"], function["name"], "", "in_progress"))
            self._call = delta["index"]
        if arguments := function.get("arguments"):
            self._written += arguments
            yield self._item_event("response.function_call_arguments.delta", delta=arguments)

    def close(self, status: str = "completed") -> Iterator[Event]:
        """Complete the open item, if there is one, with `status`."""
        if self._open is None:
            return
        item = self._open | {"status": status}
        if self._kind == "message":
            item["content"] = [_text_part(self._written)]
            yield self._content_event("response.output_text.done", text=self._written, logprobs=[])
            yield self._content_event("response.content_part.done", part=_text_part(self._written))
        elif self._kind == "reasoning":
            item["content"] = [_thought_part(self._written)]
            yield self._content_event("response.reasoning_text.done", text=self._written)
        else:
            item["arguments"] = self._written
            name = item["name"]
            yield self._item_event("response.function_call_arguments.done", arguments=self._written, name=name)
        yield {"type": "response.output_item.done", "output_index": len(self.done), "item": item}
        self.done.append(item)
        self._open, self._written, self._call = None, "", None

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        self._open = item
        yield {"type": "response.output_item.added", "output_index": len(self.done), "item": dict(item)}

    def _item_event(self, kind: str, **fields: Any) -> Event:
        assert self._open is not None
        return {"type": kind, "item_id": self._open["id"], "output_index": len(self.done)} | fields

    def _content_event(self, kind: str, **fields: Any) -> Event:
        return self._item_event(kind, content_index=0, **fields)


async def response_events(head: dict[str, Any], chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[Event]:
    """Yield the numbered events of one response.

    Args:
        head: Fields of the response that do not change while it is written.
        chunks: Chunks of the chat's stream; closed at the end.
    """
    number = 0
    try:
        async for event in _events(head, chunks):
            yield event | {"sequence_number": number}
            number += 1
    finally:
        await chunks.aclose()  # type: ignore[attr-defined]


async def _events(head: dict[str, Any], chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[Event]:
    yield {"type": "response.created", "response": head}
    yield {"type": "response.in_progress", "response": head}
    items, finish, tail = ItemWriter(), None, dict[str, Any]()
    try:
        async for chunk in chunks:
            if chunk.get("usage"):
                tail = {"usage": responses_usage(chunk["usage"]), "metrics": chunk["metrics"]}
            for choice in chunk["choices"]:
                finish = choice["finish_reason"] or finish
                for event in _delta_events(items, choice["delta"]):
                    yield event
    except ApiError as error:
        cause = {"code": "invalid_prompt" if error.status < 500 else "server_error", "message": str(error)}
        yield {"type": "response.failed", "response": head | {"status": "failed", "error": cause, "output": items.done}}
        return
    status = "incomplete" if finish == "length" else "completed"
    if items.empty:
        for event in items.add_text(""):
            yield event
    for event in items.close(status):
        yield event
    details = {"reason": "max_output_tokens"} if status == "incomplete" else None
    response = head | {"status": status, "incomplete_details": details, "output": items.done} | tail
    yield {"type": f"response.{status}", "response": response}


def _delta_events(items: ItemWriter, delta: dict[str, Any]) -> Iterator[Event]:
    if delta.get("reasoning_content"):
        yield from items.add_thought(delta["reasoning_content"])
    if delta.get("content"):
        yield from items.add_text(delta["content"])
    for call in delta.get("tool_calls") or ():
        yield from items.add_call(call)


async def format_events(events: AsyncIterator[Event]) -> AsyncIterator[str]:
    """Yield events as server-sent events of the Responses protocol, and close `events` at the end."""
    try:
        async for event in events:
            yield f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"
    finally:
        await events.aclose()  # type: ignore[attr-defined]
