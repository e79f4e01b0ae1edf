"""Serve `/v1/responses`: translate OpenAI's Responses requests to chat requests, and the answers back.

https://platform.openai.com/docs/api-reference/responses
"""

import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, StrictBool
from starlette.routing import BaseRoute

from redrafter.serve.extension import Respond
from redrafter.serve.network.guards import JsonRoute
from redrafter.serve.protocol import requests
from redrafter.serve.protocol.fields import Count, Labels, OneOf, Parts, Strict
from redrafter.serve.routes.translated import Event, Kind, PartWriter, chat_request, format_events

if TYPE_CHECKING:
    from redrafter.serve.server import Server

# Fields of a request that its response repeats.
_ECHOED = ("instructions", "max_output_tokens", "prompt_cache_key", "safety_identifier", "temperature", "top_p", "user")

_ITEMS = ("message", "reasoning", "function_call", "function_call_output")


class Part(Strict):
    """A text part of a message. Parts returned by the server may be sent back unchanged."""

    type: Literal["input_text", "output_text", "reasoning_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputImage(Strict):
    """An image as a part of a message of the user.

    Attributes:
        image_url: A `data:` URL in base64.
        detail: Requested resolution; ignored, since the model's processor determines it.
    """

    type: Literal["input_image"]
    image_url: requests.DataUrl
    detail: Literal["auto"] = "auto"


_MessagePart = Annotated[Part | InputImage, OneOf("a part of text or an image")]


class _Item(Strict):
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(_Item):
    """A message in the input."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | Parts[_MessagePart], OneOf("a text or a list of parts")]


class ReasoningItem(_Item):
    """Thoughts of the assistant before the items that follow. Summaries and encrypted thoughts are rejected."""

    type: Literal["reasoning"]
    content: Parts[Part] | None = None
    summary: Annotated[list[Any], Field(max_length=0)] | None = None


class CallItem(_Item):
    """A tool call made by the model."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(_Item):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts[Part]


Item = Annotated[MessageItem | ReasoningItem | CallItem | CallOutputItem, OneOf(f"an item of type {', '.join(_ITEMS)}")]


class FlatTool(Strict):
    """A function that the model may call, in the flat format of the Responses protocol."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class FlatToolChoice(Strict):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class TextFormat(Strict):
    """Format of the answer's text; the fields of a JSON schema are at the same level as `type`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: StrictBool | None = None


class TextConfig(Strict):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: None = None


class Reasoning(Strict):
    """Reasoning options. The effort is passed to a chat template that reads it."""

    effort: str | None = None


class ResponseStreamOptions(Strict):
    """Options of a streamed answer."""

    include_obfuscation: Literal[False] = False


class ResponsesRequest(requests.SharedFields):
    """Body of `POST /v1/responses`: fields of OpenAI, then fields shared with `/v1/chat/completions`."""

    input: Annotated[str | Annotated[Parts[Item], Field(min_length=1)], OneOf("a text or a list of items")]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    metadata: Labels | None = None
    parallel_tool_calls: StrictBool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    stream_options: ResponseStreamOptions | None = None
    text: TextConfig | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatToolChoice | None = None
    tools: Annotated[list[FlatTool], Field(fail_fast=True, max_length=requests.MAX_TOOLS)] | None = None
    top_logprobs: Literal[0] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    include: Annotated[list[Any], Field(max_length=0)] | None = None
    reasoning: Reasoning | None = None


def responses_routes(server: "Server", respond: Respond) -> list[BaseRoute]:
    """Return the route. `respond` is the argument of `Extension.routes`."""
    routes = APIRouter(route_class=JsonRoute)

    @routes.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        head = _head(body, body.model or server.model)

        async def work() -> dict[str, Any] | AsyncIterator[dict[str, Any]]:
            try:
                answer = await server.chat(as_chat(body), request.scope["facts"])
            except requests.TooManyTokensError as error:  # it names the chat's field
                lengths = error.prompt, error.asked, error.context
                raise requests.TooManyTokensError(*lengths, "max_output_tokens") from None
            return head | _whole(answer) if isinstance(answer, dict) else response_events(head, answer)

        return await respond(work(), request, format_events)

    return routes.routes


def as_chat(request: ResponsesRequest) -> requests.ChatRequest:
    """Translate a Responses request to a chat request, or raise `ApiError` or `RequestValidationError`."""
    chat: dict[str, Any] = {"messages": _messages(request), "max_completion_tokens": request.max_output_tokens}
    chat |= {name: getattr(request, name) for name in ("parallel_tool_calls", "service_tier")}
    if request.reasoning is not None:
        chat["reasoning_effort"] = request.reasoning.effort
    if request.stream:
        chat["stream_options"] = {"include_usage": True}
    if request.tools:
        functions = (tool.model_dump(exclude={"type"}, exclude_none=True) for tool in request.tools)
        chat["tools"] = [{"type": "function", "function": function} for function in functions]
    chat["tool_choice"] = request.tool_choice if request.tools or request.tool_choice != "auto" else None
    if isinstance(request.tool_choice, FlatToolChoice):
        chat["tool_choice"] = {"type": "function", "function": {"name": request.tool_choice.name}}
    form = None if request.text is None else request.text.format
    if form is not None:
        chat["response_format"] = {"type": form.type}
        if form.type == "json_schema":
            if form.schema_ is None:
                raise requests.ApiError(400, "text.format of type json_schema needs a schema", "text.format.schema")
            schema = {"name": form.name or "schema", "schema": form.schema_, "strict": form.strict}
            chat["response_format"]["json_schema"] = schema
    return chat_request(chat, request)


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the chat messages of a request.

    Consecutive thoughts, assistant text and calls become one message.
    """
    messages: list[dict[str, Any]] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    for item in request.input:
        # Items of one turn come one by one, and chat messages hold thoughts, text and calls together.
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        if isinstance(item, ReasoningItem):
            messages.append({"role": "assistant", "content": None, "reasoning_content": _text(item.content or [])})
        elif isinstance(item, CallItem):
            function = {"name": item.name, "arguments": item.arguments}
            if last is None:
                messages.append(last := {"role": "assistant", "content": None})
            last.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        elif isinstance(item, CallOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif item.role == "assistant" and last and last["content"] is None and "tool_calls" not in last:
            last["content"] = _content(item.content)  # the message already has its thoughts
        else:
            messages.append({"role": item.role, "content": _content(item.content)})
    return messages


def _content(content: str | list[Part | InputImage]) -> str | list[dict[str, Any]]:
    if isinstance(content, str) or not any(isinstance(part, InputImage) for part in content):
        return _text(content)
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, Part)
        else {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}}
        for part in content
    ]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _head(body: ResponsesRequest, model: str) -> dict[str, Any]:
    """Return the fields that all responses to a request share: the request's fields, and defaults for the rest."""
    format = None if body.text is None or body.text.format is None else body.text.format

    def as_dict(part: Any) -> Any:
        return part if isinstance(part, str) else part.model_dump(exclude_none=True, by_alias=True)

    return {
        **{name: getattr(body, name) for name in _ECHOED},
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        **dict.fromkeys(("background", "store"), False),
        **dict.fromkeys(("error", "incomplete_details", "previous_response_id", "usage")),
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "service_tier": "default",
        "text": {"format": as_dict(format) if format is not None else {"type": "text"}},
        "tool_choice": as_dict(body.tool_choice) if body.tool_choice is not None else "auto",
        "tools": [as_dict(tool) | {"parameters": tool.parameters, "strict": tool.strict} for tool in body.tools or ()],
        "top_logprobs": 0,
        "truncation": "disabled",
    }


def _whole(answer: dict[str, Any]) -> dict[str, Any]:
    items = ItemWriter()
    items.translate_whole(answer)
    return _ending(items) | _usage(answer)


def _ending(items: "ItemWriter") -> dict[str, Any]:
    details = {"reason": "max_output_tokens"} if items.status == "incomplete" else None
    return {"status": items.status, "incomplete_details": details, "output": items.done}


def _usage(chat: dict[str, Any]) -> dict[str, Any]:
    """Return a chat answer's usage under the names of the Responses protocol, with its metrics."""
    usage = chat["usage"]
    reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    counts = {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage["total_tokens"],
    }
    return {"usage": counts, "metrics": chat["metrics"]}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class ItemWriter(PartWriter):
    """Converts a chat's answer to the items of one response."""

    def __init__(self) -> None:
        super().__init__()
        self._item: dict[str, Any] = {}  # the open item

    @property
    def status(self) -> str:
        """Status of the ended response."""
        return "incomplete" if self.finish == "length" else "completed"

    def _begin(self, kind: Kind, call: dict[str, Any]) -> Iterator[Event]:
        if kind == "thought":
            yield self._added("rs", "reasoning", status="in_progress", summary=[], content=[])
        elif kind == "call":
            named = {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
            yield self._added("fc", "function_call", status="in_progress", **named)
        else:
            yield self._added("msg", "message", role="assistant", status="in_progress", content=[])
            yield self._content_event("response.content_part.added", part=_text_part(""))

    def _added(self, prefix: str, kind: str, **fields: Any) -> Event:
        self._item = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind} | fields
        return {"type": "response.output_item.added", "output_index": len(self.done), "item": dict(self._item)}

    def _tell(self, piece: str) -> Iterator[Event]:
        if self._kind == "thought":
            yield self._content_event("response.reasoning_text.delta", delta=piece)
        elif self._kind == "call":
            yield self._item_event("response.function_call_arguments.delta", delta=piece)
        else:
            yield self._content_event("response.output_text.delta", delta=piece, logprobs=[])

    def _end(self, cut: bool) -> Iterator[Event]:
        item, written = self._item | {"status": "incomplete" if cut else "completed"}, self._written
        if self._kind == "thought":
            item["content"] = [{"type": "reasoning_text", "text": written}]
            yield self._content_event("response.reasoning_text.done", text=written)
        elif self._kind == "call":
            item["arguments"] = written
            yield self._item_event("response.function_call_arguments.done", arguments=written, name=item["name"])
        else:
            item["content"] = [_text_part(written)]
            yield self._content_event("response.output_text.done", text=written, logprobs=[])
            yield self._content_event("response.content_part.done", part=_text_part(written))
        yield {"type": "response.output_item.done", "output_index": len(self.done), "item": item}
        self.done.append(item)

    def _item_event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self._item["id"], "output_index": len(self.done)} | fields

    def _content_event(self, kind: str, **fields: Any) -> Event:
        return self._item_event(kind, content_index=0, **fields)


async def response_events(head: dict[str, Any], chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[Event]:
    """Convert the chunks of a chat's stream to a response's numbered events, and close the stream at the end.

    `head` has the response's fields that do not change during generation.
    """
    number = 0
    async with aclosing(chunks):  # type: ignore[type-var]
        async for event in _events(head, chunks):
            yield event | {"sequence_number": number}
            number += 1


async def _events(head: dict[str, Any], chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[Event]:
    # The API prescribes both events before any output.
    yield {"type": "response.created", "response": head}
    yield {"type": "response.in_progress", "response": head}
    items = ItemWriter()
    try:
        async for chunk in chunks:
            for event in items.translate(chunk):
                yield event
    except requests.ApiError as error:
        cause = {"code": "invalid_prompt" if error.status < 500 else "server_error", "message": str(error)}
        yield {"type": "response.failed", "response": head | {"status": "failed", "error": cause, "output": items.done}}
        return
    for event in items.close():
        yield event
    usage = _usage(items.reported) if items.reported else {}
    yield {"type": f"response.{items.status}", "response": head | _ending(items) | usage}
