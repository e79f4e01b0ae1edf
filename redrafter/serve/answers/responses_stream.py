"""The typed events of `/v1/responses`, from the parts of a chat's stream."""

import json
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

from redrafter.serve.protocol.requests import ApiError

__all__ = ["call_item", "message_item", "reasoning_item", "response_events", "server_sent", "usage_of"]

Event = dict[str, Any]


def message_item(text: str | None, status: str) -> dict[str, Any]:
    """Return a message of the assistant; None for one that has no part yet."""
    content = [] if text is None else [_part(text)]
    return {"id": _id("msg"), "type": "message", "role": "assistant", "status": status, "content": content}


def reasoning_item(text: str | None, status: str) -> dict[str, Any]:
    """Return thoughts of the assistant; None for some that have no part yet."""
    content = [] if text is None else [_thought(text)]
    return {"id": _id("rs"), "type": "reasoning", "status": status, "summary": [], "content": content}


def call_item(call_id: str, name: str, arguments: str, status: str = "completed") -> dict[str, Any]:
    """Return a call of a function."""
    item = {"id": _id("fc"), "type": "function_call", "status": status}
    return item | {"call_id": call_id, "name": name, "arguments": arguments}


def usage_of(chat: dict[str, Any]) -> dict[str, Any]:
    """Return a chat's usage in the words of the Responses protocol."""
    cached = chat["prompt_tokens_details"]["cached_tokens"]
    reasoning = (chat.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": chat["total_tokens"],
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class Items:
    """The items of one response while they are written. Each method yields the events of what it does."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._written = ""  # of the open item
        self._call: int | None = None  # the number of the open call

    @property
    def empty(self) -> bool:
        """Whether nothing was written, or begun."""
        return self._open is None and not self.done

    @property
    def _kind(self) -> str | None:
        return None if self._open is None else str(self._open["type"])

    def text(self, delta: str) -> Iterator[Event]:
        """Write on in a message, or begin one."""
        if self._kind != "message":
            yield from self.close()
            yield from self._begin(message_item(None, "in_progress"))
            yield self._of_part("response.content_part.added", part=_part(""))
        if delta:
            self._written += delta
            yield self._of_part("response.output_text.delta", delta=delta, logprobs=[])

    def thought(self, delta: str) -> Iterator[Event]:
        """Write on in thoughts, or begin some."""
        if self._kind != "reasoning":
            yield from self.close()
            yield from self._begin(reasoning_item(None, "in_progress"))
        self._written += delta
        yield self._of_part("response.reasoning_text.delta", delta=delta)

    def call(self, delta: dict[str, Any]) -> Iterator[Event]:
        """Write on in a call, or begin one."""
        function = delta["function"]
        if self._open is None or self._call != delta["index"]:
            yield from self.close()
            yield from self._begin(call_item(delta["id"], function["name"], "", "in_progress"))
            self._call = delta["index"]
        if arguments := function.get("arguments"):
            self._written += arguments
            yield self._of_item("response.function_call_arguments.delta", delta=arguments)

    def close(self, status: str = "completed") -> Iterator[Event]:
        """End the item that is open, if any. status: how it ends."""
        if self._open is None:
            return
        item = self._open | {"status": status}
        if self._kind == "message":
            item["content"] = [_part(self._written)]
            yield self._of_part("response.output_text.done", text=self._written, logprobs=[])
            yield self._of_part("response.content_part.done", part=_part(self._written))
        elif self._kind == "reasoning":
            item["content"] = [_thought(self._written)]
            yield self._of_part("response.reasoning_text.done", text=self._written)
        else:
            item["arguments"] = self._written
            name = item["name"]
            yield self._of_item("response.function_call_arguments.done", arguments=self._written, name=name)
        yield {"type": "response.output_item.done", "output_index": len(self.done), "item": item}
        self.done.append(item)
        self._open, self._written, self._call = None, "", None

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        self._open = item
        yield {"type": "response.output_item.added", "output_index": len(self.done), "item": dict(item)}

    def _of_item(self, kind: str, **more: Any) -> Event:
        assert self._open is not None
        return {"type": kind, "item_id": self._open["id"], "output_index": len(self.done)} | more

    def _of_part(self, kind: str, **more: Any) -> Event:
        return self._of_item(kind, content_index=0, **more)


async def response_events(head: dict[str, Any], parts: AsyncIterator[dict[str, Any]]) -> AsyncIterator[Event]:
    """Yield the events of one response, numbered. head: what every response of it says."""
    number = 0
    try:
        async for event in _events(head, parts):
            yield event | {"sequence_number": number}
            number += 1
    finally:
        await parts.aclose()  # type: ignore[attr-defined]


async def _events(head: dict[str, Any], parts: AsyncIterator[dict[str, Any]]) -> AsyncIterator[Event]:
    yield {"type": "response.created", "response": head}
    yield {"type": "response.in_progress", "response": head}
    items, finish, tail = Items(), None, dict[str, Any]()
    try:
        async for part in parts:
            if part.get("usage"):
                tail = {"usage": usage_of(part["usage"]), "metrics": part["metrics"]}
            for choice in part["choices"]:
                finish = choice["finish_reason"] or finish
                for event in _of_delta(items, choice["delta"]):
                    yield event
    except ApiError as error:
        told = {"code": "invalid_prompt" if error.status < 500 else "server_error", "message": str(error)}
        yield {"type": "response.failed", "response": head | {"status": "failed", "error": told, "output": items.done}}
        return
    status = "incomplete" if finish == "length" else "completed"
    if items.empty:
        for event in items.text(""):
            yield event
    for event in items.close(status):
        yield event
    details = {"reason": "max_output_tokens"} if status == "incomplete" else None
    whole = head | {"status": status, "incomplete_details": details, "output": items.done} | tail
    yield {"type": f"response.{status}", "response": whole}


def _of_delta(items: Items, delta: dict[str, Any]) -> Iterator[Event]:
    if delta.get("reasoning_content"):
        yield from items.thought(delta["reasoning_content"])
    if delta.get("content"):
        yield from items.text(delta["content"])
    for call in delta.get("tool_calls") or ():
        yield from items.call(call)


async def server_sent(events: AsyncIterator[Event]) -> AsyncIterator[str]:
    """Write events as the Responses protocol sends them."""
    try:
        async for event in events:
            yield f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"
    finally:
        await events.aclose()  # type: ignore[attr-defined]
