"""Translate OpenAI's Responses requests to chat requests."""

from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from redrafter.serve.protocol.requests import ApiError, ChatRequest
from redrafter.serve.protocol.responses import (
    CallItem,
    CallOutputItem,
    FlatTool,
    FlatToolChoice,
    InputImage,
    Part,
    ReasoningItem,
    ResponsesRequest,
    TextFormat,
)

__all__ = ["as_chat"]


def as_chat(request: ResponsesRequest) -> ChatRequest:
    """Translate a Responses request to a chat request.

    Raises:
        ApiError: If a JSON schema is missing.
        RequestValidationError: If the chat request is invalid.
    """
    shared = ("model", "parallel_tool_calls", "service_tier", "temperature", "top_p", "user", "seed", "top_k", "min_p")
    chat: dict[str, Any] = {name: getattr(request, name) for name in shared}
    chat |= {"messages": _messages(request), "max_completion_tokens": request.max_output_tokens}
    chat |= {"ignore_eos": request.ignore_eos, "stream": request.stream}
    if request.reasoning is not None:
        chat["reasoning_effort"] = request.reasoning.effort
    if request.stream:
        chat["stream_options"] = {"include_usage": True}
    if request.tools:
        chat["tools"] = [{"type": "function", "function": _function(tool)} for tool in request.tools]
    choice = request.tool_choice
    named = isinstance(choice, FlatToolChoice)
    chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}} if named else choice  # type: ignore[union-attr]
    if request.text is not None and request.text.format is not None:
        chat["response_format"] = _format(request.text.format)
    try:
        return ChatRequest.model_validate(chat)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error


def _function(tool: FlatTool) -> dict[str, Any]:
    return tool.model_dump(exclude={"type"}, exclude_none=True)


def _format(text_format: TextFormat) -> dict[str, Any]:
    """Return the `response_format` of a chat request."""
    if text_format.type != "json_schema":
        return {"type": text_format.type}
    if text_format.schema_ is None:
        raise ApiError(400, "text.format of type json_schema needs a schema", "text.format.schema")
    schema = {"name": text_format.name or "schema", "schema": text_format.schema_, "strict": text_format.strict}
    return {"type": "json_schema", "json_schema": schema}


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the chat messages of a request.

    Thoughts, a text of the assistant and calls that follow each other become one message.
    """
    messages: list[dict[str, Any]] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    for item in request.input:
        if isinstance(item, ReasoningItem):
            messages.append({"role": "assistant", "content": None, "reasoning_content": _text(item.content or [])})
        elif isinstance(item, CallItem):
            call = {"id": item.call_id, "type": "function"}
            call["function"] = {"name": item.name, "arguments": item.arguments}  # type: ignore[assignment]
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif isinstance(item, CallOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif item.role == "assistant" and messages and _only_thoughts(messages[-1]):
            messages[-1]["content"] = _content(item.content)
        else:
            messages.append({"role": item.role, "content": _content(item.content)})
    return messages


def _only_thoughts(message: dict[str, Any]) -> bool:
    """Return whether a message of the assistant has neither content nor calls yet."""
    return message["role"] == "assistant" and message["content"] is None and "tool_calls" not in message


def _content(content: str | list[Part | InputImage]) -> str | list[dict[str, Any]]:
    """Return the content of a chat message: a text, or parts where there are images."""
    if isinstance(content, str):
        return content
    texts = [part for part in content if isinstance(part, Part)]
    return _text(texts) if len(texts) == len(content) else [_chat_part(part) for part in content]


def _chat_part(part: Part | InputImage) -> dict[str, Any]:
    if isinstance(part, Part):
        return {"type": "text", "text": part.text}
    return {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}}


def _text(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
