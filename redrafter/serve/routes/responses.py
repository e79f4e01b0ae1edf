"""`/v1/responses`: OpenAI's Responses protocol, translated into a chat request and its answer back."""

import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from redrafter.serve.answers.responses_stream import (
    call_item,
    format_events,
    message_item,
    reasoning_item,
    response_events,
    responses_usage,
)
from redrafter.serve.protocol.response_models import answer_responses
from redrafter.serve.protocol.responses import ResponseAnswer, ResponsesRequest
from redrafter.serve.protocol.responses_as_chat import as_chat
from redrafter.serve.service import Service

__all__ = ["add_responses"]

Respond = Callable[..., Awaitable[Response]]


def add_responses(app: FastAPI, service: Service, respond: Respond) -> None:
    """Add the route. respond: makes a response of a dictionary or a stream, and stops if the client leaves."""

    @app.post("/v1/responses", responses=answer_responses(ResponseAnswer))
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        head = _head(body, body.model or service.model)

        async def work() -> dict[str, Any] | AsyncIterator[dict[str, Any]]:
            answer = await service.chat(as_chat(body), request.scope["facts"])
            return head | _whole(answer) if isinstance(answer, dict) else response_events(head, answer)

        return await respond(work(), request, format_events)


def _head(body: ResponsesRequest, model: str) -> dict[str, Any]:
    """Return the fields that all responses to a request share: those of the request, and defaults of the others."""
    format = None if body.text is None or body.text.format is None else body.text.format
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": body.temperature,
        "text": {"format": _as_dict(format) if format is not None else {"type": "text"}},
        "tool_choice": _as_dict(body.tool_choice) if body.tool_choice is not None else "auto",
        "tools": [_as_dict(tool) | {"parameters": tool.parameters, "strict": tool.strict} for tool in body.tools or ()],
        "top_logprobs": 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _as_dict(part: Any) -> Any:
    return part if isinstance(part, str) else part.model_dump(exclude_none=True, by_alias=True)


def _whole(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a chat request as the fields of a response."""
    [choice] = answer["choices"]
    message, cut = choice["message"], choice["finish_reason"] == "length"
    calls = message.get("tool_calls") or []
    status = "incomplete" if cut else "completed"
    thoughts = message.get("reasoning_content")
    output = [reasoning_item(thoughts, "completed" if message["content"] or calls else status)] if thoughts else []
    if message["content"] or not (calls or thoughts):
        output.append(message_item(message["content"] or "", status))
    output += [call_item(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return {
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output,
        "usage": responses_usage(answer["usage"]),
        "metrics": answer["metrics"],
    }
