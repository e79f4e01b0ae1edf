"""Models of the routes' answers, for `/openapi.json`."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "cancelled", "tool_calls"]


class _Answer(BaseModel):
    """Base of answers, which forbids unlisted fields."""

    model_config = ConfigDict(extra="forbid")


class Error(_Answer):
    """Description of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(_Answer):
    """Body of an error."""

    error: Error


class ModelHealth(_Answer):
    """The served model, and the requests that are running."""

    model: str
    running: int


class Model(_Answer):
    """A served model, or an adapter of `parent`.

    `default_temperature` applies to requests without a temperature: the generation config's, or 1.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    parent: str | None
    default_temperature: float | None = None


class ModelList(_Answer):
    """List of the served models."""

    object: Literal["list"]
    data: list[Model]


class PromptDetails(_Answer):
    """Breakdown of the prompt tokens."""

    cached_tokens: int


class CompletionDetails(_Answer):
    """Breakdown of the completion tokens: tokens of thoughts and the marks around them."""

    reasoning_tokens: int


class Usage(_Answer):
    """Token counts of an answer; only chats have details of the completion tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | None = None


class Speculation(_Answer):
    """Speculation metrics of an answer, computed by `speculation_metrics`."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    acceptance_by_depth: list[float | None]
    num_copied_draft_tokens: int
    num_accepted_copied_tokens: int
    per_step_accepted: list[int] | None = None
    per_step_drafted: list[int] | None = None


class SpecTokensDetails(_Answer):
    """The same metrics under SGLang's names."""

    spec_accept_rate: float
    spec_accept_length: float
    spec_num_correct_drafts: int
    spec_num_proposed_drafts: int
    spec_verify_ct: int
    spec_correct_drafts_histogram: list[int]


class SglExt(_Answer):
    """SGLang's object for details that a request asks for."""

    spec_tokens_details: SpecTokensDetails


class AnswerMetrics(_Answer):
    """Metrics of an answer."""

    speculative_decoding: Speculation


class _GeneratedAnswer(_Answer):
    """Fields that all generated answers share."""

    id: str
    created: int
    model: str
    usage: Usage
    metrics: AnswerMetrics
    sglext: SglExt | None = None


class PromptLogprob(_Answer):
    """Log-probability of a token at a position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(_Answer):
    """Log-probabilities of a completion, in OpenAI's legacy format."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionAnswerChoice(_Answer):
    """A choice of a completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionAnswer(_GeneratedAnswer):
    """Answer of `/v1/completions`."""

    object: Literal["text_completion"]
    choices: list[CompletionAnswerChoice]


class TokenLogprob(_Answer):
    """Log-probability of a token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TokenLogprob):
    """Log-probability of a generated token, and of the likeliest alternatives."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(_Answer):
    """Log-probabilities of a chat message."""

    content: list[ChatLogprob]
    refusal: None


class CalledFunction(_Answer):
    """A called function with its arguments as JSON."""

    name: str
    arguments: str


class AnswerToolCall(_Answer):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(_Answer):
    """A message of the assistant."""

    role: Literal["assistant"]
    refusal: None
    content: str | None
    reasoning_content: str = ""
    tool_calls: list[AnswerToolCall] = Field(default_factory=list)


class ChatAnswerChoice(_Answer):
    """A message of a chat answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | None = None


class ChatAnswer(_GeneratedAnswer):
    """Answer of `/v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatAnswerChoice]
    prompt_logprobs: PromptLogprobs | None = None


_EVENT_SCHEMA = {
    "type": "object",
    "properties": {"data": {"type": "string", "description": "a part as JSON; last, [DONE]"}},
}
_STREAM_CONTENT = {"text/event-stream": {"schema": _EVENT_SCHEMA}}  # with stream=true
_ERROR_CAUSES = {
    400: "a field that is not supported, of the wrong type or out of range, or a request that cannot be served",
    401: "the API key is missing or wrong",
    403: "another host, page or key than may ask",
    404: "another model's name",
    408: "the body did not come in time",
    413: "the body is too long",
    429: "as many requests wait as may",
    500: "the engine failed",
    503: "the server is stopping",
}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` argument of a route for errors with some HTTP statuses."""
    return {status: {"model": ErrorAnswer, "description": _ERROR_CAUSES[status]} for status in statuses}


def answer_responses(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` argument of a route that returns generated text, as `model` or as a stream."""
    success = {"model": model, "content": _STREAM_CONTENT, "description": "the texts"}
    return {200: success} | error_responses(*_ERROR_CAUSES)
