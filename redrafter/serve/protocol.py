"""OpenAI's requests, and what this server takes beside them. What is not here is refused by name.

https://platform.openai.com/docs/api-reference
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, field_validator, model_validator

from redrafter.errors import ReDrafterError

__all__ = [
    "ApiError",
    "ChatRequest",
    "CompletionRequest",
    "Message",
    "StreamOptions",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "error_body",
]

MOST_CHOICES = 128
MOST_PROMPTS = 1024  # of one request, choices counted
MOST_TOOLS = 128
MOST_BIASES = 1 << 14
MOST_PARTS = 4096  # messages of a request, parts of a message, calls in it
MOST_TEXTS = 1 << 17  # that a choice is among
MOST = 2**31 - 1  # of a count or an id
LONGEST_SALT = 512  # characters
LONGEST_MESSAGE, LONGEST_NAME = 1000, 100  # characters of what an error says


def _few(given: Any) -> Any:
    """Else each of a million wrong entries would become an error of its own, and errors are large."""
    if isinstance(given, dict) and len(given) > MOST_BIASES:
        raise ValueError(f"{len(given)} entries; at most {MOST_BIASES}")
    return given


Bias = Annotated[dict[str, Annotated[float, Field(strict=True, ge=-100, le=100)]], BeforeValidator(_few)]
# fail_fast, here and below: for the same reason.
Ids = Annotated[list[Annotated[int, Field(strict=True, ge=0, le=MOST)]], Field(fail_fast=True)]


class ApiError(ReDrafterError):
    """An answer that is an error. param: the field that is to blame."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's shape of an error."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "unavailable_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    message, param = _plain(message, LONGEST_MESSAGE), param and _plain(param, LONGEST_NAME)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _plain(text: str, longest: int) -> str:
    """What a client gave may be long, and hold halves of characters, which cannot be sent back."""
    return text[:longest].encode(errors="replace").decode()


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    _known = model_validator(mode="before")(_few)


class StreamOptions(_Strict):
    """continuous_usage_stats: vLLM's. With include_usage, every part tells what its choice has come to. include_drafts:
    this server's own. Each part's choice then has `drafts`, its text in runs that accepted drafts wrote and others that
    the target drew itself."""

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False
    include_drafts: StrictBool = False
    include_obfuscation: Literal[False] = False


class JsonSchema(_Strict):
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(_Strict):
    """OpenAI's, and llgtrt's grammars in Lark."""

    type: Literal["text", "json_object", "json_schema", "lark_grammar"]
    json_schema: JsonSchema | None = None
    lark_grammar: str | None = None

    @model_validator(mode="after")
    def _whole(self) -> "ResponseFormat":
        for name in ("json_schema", "lark_grammar"):
            if (self.type == name) != (getattr(self, name) is not None):
                raise ValueError(f"{name} is given with type {name}, and only then")
        return self


class StructuredOutputs(_Strict):
    """A grammar; exactly one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True, max_length=MOST_TEXTS)] | None = None
    lark: str | None = None
    ebnf: str | None = None

    @model_validator(mode="after")
    def _one(self) -> "StructuredOutputs":
        if sum(value is not None for _, value in self) != 1:
            raise ValueError("give exactly one of json, json_object, regex, choice, lark, ebnf")
        return self


class _Request(_Strict):
    """What both kinds of requests share. Below OpenAI's fields, those of vLLM."""

    model: str | None = None
    frequency_penalty: Annotated[float, Field(strict=True, ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(strict=True, ge=-2, le=2)] | None = None
    logit_bias: Bias | None = None
    max_tokens: Annotated[int, Field(strict=True, ge=1, le=MOST)] | None = None
    n: Annotated[int, Field(strict=True, ge=1, le=MOST_CHOICES)] | None = None
    seed: Annotated[int, Field(strict=True, ge=0, lt=1 << 62)] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=16)] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(strict=True, ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] | None = None
    user: str | None = None

    top_k: Annotated[int, Field(strict=True, ge=-1, le=MOST)] | None = None
    min_p: Annotated[float, Field(strict=True, ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(strict=True, gt=0, le=2)] | None = None
    min_tokens: Annotated[int, Field(strict=True, ge=0, le=MOST)] | None = None
    ignore_eos: StrictBool = False
    stop_token_ids: Ids | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=LONGEST_SALT)] | None = None
    structured_outputs: StructuredOutputs | None = None
    speculate: StrictBool = True

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        found = [value] if isinstance(value, str) else value or []
        if not all(0 < len(each) <= 1000 for each in found):
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

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, max_length=MOST_PROMPTS)]
        | Ids
        | Annotated[list[Ids], Field(fail_fast=True, max_length=MOST_PROMPTS)]
    )
    best_of: Literal[1] | None = None
    echo: StrictBool = False
    logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    suffix: None = None


class Function(_Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


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
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MOST_PARTS)] | None = None
    name: str | None = None
    refusal: None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MOST_PARTS)] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatRequest(_Request):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MOST_PARTS)]
    max_completion_tokens: Annotated[int, Field(strict=True, ge=1, le=MOST)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: StrictBool | None = None
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
