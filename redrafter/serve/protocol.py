"""OpenAI's requests, and what this server takes beside them. What is not here is refused by name.

https://platform.openai.com/docs/api-reference
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from redrafter.errors import ReDrafterError

__all__ = ["ApiError", "ChatRequest", "CompletionRequest", "Message", "Tool", "ToolCall", "ToolChoice", "error_body"]

MOST_CHOICES = 128
MOST = 2**31 - 1  # of a count or an id
Bias = dict[str, Annotated[float, Field(ge=-100, le=100)]]
Ids = list[Annotated[int, Field(ge=0, le=MOST)]]


class ApiError(ReDrafterError):
    """An answer that is an error. param: the field that is to blame."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's shape of an error."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "unavailable_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class JsonSchema(_Strict):
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _whole(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is given with type json_schema, and only then")
        return self


class StructuredOutputs(_Strict):
    """A grammar; exactly one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    lark: str | None = None
    ebnf: str | None = None

    @model_validator(mode="after")
    def _one(self) -> "StructuredOutputs":
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError("give exactly one of json, json_object, regex, choice, lark, ebnf")
        return self


class _Request(_Strict):
    """What both kinds of requests share. Below OpenAI's fields, those of vLLM."""

    model: str | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Bias | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MOST)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 62)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    user: str | None = None

    top_k: Annotated[int, Field(ge=-1, le=MOST)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MOST)] | None = None
    ignore_eos: bool = False
    stop_token_ids: Ids | None = None
    structured_outputs: StructuredOutputs | None = None

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        found = [value] if isinstance(value, str) else value or []
        if len(found) > 16 or not all(0 < len(each) <= 1000 for each in found):
            raise ValueError("up to 16 stop strings of 1 to 1000 characters")
        return value

    @model_validator(mode="after")
    def _streams(self) -> "_Request":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for stream=true")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


class CompletionRequest(_Request):
    """`POST /v1/completions`."""

    prompt: str | list[str] | Ids | list[Ids]
    best_of: Literal[1] | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: None = None


class Function(_Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict):
    type: Literal["function"]
    function: Function


class FunctionName(_Strict):
    name: str


class ToolChoice(_Strict):
    type: Literal["function"]
    function: FunctionName


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class FunctionCall(_Strict):
    name: str
    arguments: str


class ToolCall(_Strict):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatRequest(_Request):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MOST)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("give max_tokens or max_completion_tokens, not both")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError("tool_choice needs tools")
        if isinstance(self.tool_choice, ToolChoice):
            names = [tool.function.name for tool in self.tools or ()]
            if self.tool_choice.function.name not in names:
                raise ValueError(f"tool_choice names {self.tool_choice.function.name!r}; the tools are {names}")
        asked = [
            self.structured_outputs,
            self.response_format,
            None if self.tool_choice == "auto" else self.tool_choice,
        ]
        if sum(each not in (None, "none") for each in asked) > 1:
            raise ValueError("give one of response_format, structured_outputs and tool_choice")
        return self
