"""Models of Anthropic's Messages requests and the format of its errors. Unsupported fields are rejected by name.

https://platform.claude.com/docs/en/api/messages
"""

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, model_validator

from redrafter.serve.protocol import requests
from redrafter.serve.protocol.fields import Count, OneOf, Parts, StopList, Strict

_ERROR_TYPES = {
    **{401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error"},
    **{413: "request_too_large", 429: "rate_limit_error", 529: "overloaded_error"},
}


def messages_error(error: requests.ApiError) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of an error in Anthropic's format."""
    status = 529 if error.status == 503 else error.status
    message = str(error)
    # Agents match the wording of Anthropic's API, and then request fewer tokens or compact the conversation.
    if isinstance(error, requests.TooManyTokensError):
        lengths = f"{error.prompt} + {error.asked} > {error.context}"
        advice = "decrease input length or `max_tokens` and try again"
        message = f"input length and `max_tokens` exceed context limit: {lengths}, {advice}"
    elif error.code == requests.TOO_LONG:
        message = f"prompt is too long: {message}"
    message = requests.error_body(status, message)["error"]["message"]
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return status, {"type": "error", "error": {"type": kind, "message": message}}


class _Block(Strict):
    """Base of blocks. `cache_control` has no effect: every prefix stays in the cache while there is room."""

    cache_control: dict[str, Any] | None = None


class TextBlock(_Block):
    """A text block."""

    type: Literal["text"]
    text: str
    citations: list[Any] | None = None


class ImageSource(Strict):
    """The bytes of an image, in base64."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class ImageBlock(_Block):
    """An image block."""

    type: Literal["image"]
    source: ImageSource


class ThinkingBlock(_Block):
    """Thoughts of the assistant, returned unchanged. The signature is accepted without a check."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(_Block):
    """A tool call made by the model. Its input must be an object; null is one without arguments."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Any = None
    caller: dict[str, Any] | None = None


_ResultBlock = Annotated[TextBlock | ImageBlock, OneOf("a block of text or an image")]


class ToolResultBlock(_Block):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[str | Parts[_ResultBlock], OneOf("a text or a list of blocks")] | None = None
    is_error: StrictBool = False


_TYPES = ("text", "image", "thinking", "tool_use", "tool_result")
Block = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock,
    OneOf(f"a block of type {', '.join(_TYPES)}"),
]
_ROLES = {  # block types that messages of each role may contain
    "system": (TextBlock,),
    "user": (TextBlock, ImageBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
}


class MessagesTurn(Strict):
    """A message. A `system` message keeps its position if the chat template allows it, else joins a neighbour."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[str | Parts[Block], OneOf("a text or a list of blocks")]

    @model_validator(mode="after")
    def _check_blocks(self) -> "MessagesTurn":
        for block in self.blocks:
            if not isinstance(block, _ROLES[self.role]):
                raise ValueError(f"a block of type {block.type} does not belong in a message of the {self.role}")
        return self

    @property
    def blocks(self) -> list[TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]:
        """The content as blocks."""
        return text_blocks(self.content) if isinstance(self.content, str) else self.content  # type: ignore[return-value]


def text_blocks(content: str | list[TextBlock] | None) -> list[TextBlock]:
    """Return a string as a list of one block, and blocks unchanged."""
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content or []


class MessagesTool(_Block):
    """A tool that the model may call. Its input is always streamed as it is generated, even if `strict`."""

    name: requests.ToolName
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: dict[str, Any]
    strict: StrictBool | None = None
    eager_input_streaming: StrictBool | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Field(fail_fast=True)] | None = None
    defer_loading: Literal[False] | None = None


class MessagesToolChoice(Strict):
    """Whether the model may call tools (`auto`), must call one (`any`, `tool` with its name), or must not (`none`)."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: StrictBool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> "MessagesToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name is given with type tool, and only then")
        return self


class Thinking(Strict):
    """Whether the model may think before it answers (`enabled`, `adaptive`) or must not (`disabled`).

    After `budget_tokens` tokens of a thought its end is forced, if that is a token of its own; a chat template that
    reads `thinking_budget` gets the number too. With `display` set to `omitted`, thoughts are returned as an empty
    block.
    """

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Strict):
    """A JSON schema that constrains the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """Options of the answer. The effort is passed to a chat template that reads `reasoning_effort`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Edit(Strict):
    """An edit that removes the thoughts of earlier turns. Only the one that removes none is accepted."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Strict):
    """Edits that shorten a conversation before it is read."""

    edits: Parts[Edit] | None = None


System = Annotated[str | Parts[TextBlock], OneOf("a text or a list of blocks")]


class CountTokensRequest(Strict):
    """Body of `POST /v1/messages/count_tokens`: fields of the prompt. `betas` and `cache_control` have no effect."""

    model: str | None = None
    messages: Annotated[Parts[MessagesTurn], Field(min_length=1)]
    system: System | None = None
    tools: Annotated[list[MessagesTool], Field(fail_fast=True, max_length=requests.MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # used by earlier clients in place of output_config
    context_management: ContextManagement | None = None
    cache_control: dict[str, Any] | None = None
    betas: Annotated[list[str], Field(fail_fast=True)] | None = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None
    speed: Literal["standard"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Metadata(Strict):
    """Identifies the user; it has no effect."""

    user_id: str | None = None


class Diagnostics(Strict):
    """An earlier answer to compare cache use with. The answer reports that this is not available."""

    previous_message_id: str | None = None


class MessagesRequest(CountTokensRequest, requests.SharedFields):
    """Body of `POST /v1/messages`: fields of Anthropic, then fields shared with `/v1/chat/completions`."""

    max_tokens: Count
    stop_sequences: StopList | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    diagnostics: Diagnostics | None = None
