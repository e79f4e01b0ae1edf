"""What the routes answer, as `/openapi.json` tells it."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["ChatAnswer", "CompletionAnswer", "ErrorAnswer", "ModelHealth", "Models", "answers", "errors"]

Finish = Literal["stop", "length", "cancelled", "tool_calls"]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Error(_Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(_Answer):
    error: Error


class ModelHealth(_Answer):
    model: str
    running: int


class Model(_Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(_Answer):
    object: Literal["list"]
    data: list[Model]


class PromptDetails(_Answer):
    cached_tokens: int


class Usage(_Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Speculation(_Answer):
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    acceptance_by_depth: list[float | None]


class Metrics(_Answer):
    speculative_decoding: Speculation


class _Whole(_Answer):
    id: str
    created: int
    model: str
    usage: Usage
    metrics: Metrics


class PromptLogprob(_Answer):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(_Answer):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(_Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish
    prompt_logprobs: PromptLogprobs | None = None


class CompletionAnswer(_Whole):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class TokenLogprob(_Answer):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(_Answer):
    content: list[ChatLogprob]
    refusal: None


class CalledFunction(_Answer):
    name: str
    arguments: str


class Call(_Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(_Answer):
    role: Literal["assistant"]
    refusal: None
    content: str | None
    reasoning_content: str = ""
    tool_calls: list[Call] = Field(default_factory=list)


class ChatChoice(_Answer):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatAnswer(_Whole):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None = None


_EVENT = {"type": "object", "properties": {"data": {"type": "string", "description": "a part as JSON; last, [DONE]"}}}
_STREAM = {"text/event-stream": {"schema": _EVENT}}  # with stream=true
_WHEN = {
    400: "a field that is not supported, or a request that cannot be served",
    401: "the API key is missing or wrong",
    404: "another model's name",
    408: "the body did not come in time",
    413: "the body is too long",
    422: "a value of the wrong type or out of range",
    429: "as many requests wait as may",
    500: "the engine failed",
    503: "the server is stopping",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """In OpenAI's shape; `responses=` of a route."""
    return {status: {"model": ErrorAnswer, "description": _WHEN[status]} for status in statuses}


def answers(kind: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Of a route that writes texts, whole or as a stream."""
    whole = {"model": kind, "content": _STREAM, "description": "the texts"}
    return {200: whole} | errors(*_WHEN)
