"""Models of OpenAI's Responses requests.

https://platform.openai.com/docs/api-reference/responses
"""

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool

from redrafter.serve.protocol.fields import Count, Labels, OneOf, Parts, Strict
from redrafter.serve.protocol.requests import MAX_TOOLS, DataUrl, SharedFields

_ITEM_TYPES = ("message", "reasoning", "function_call", "function_call_output")


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
    image_url: DataUrl
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


Item = Annotated[
    MessageItem | ReasoningItem | CallItem | CallOutputItem, OneOf(f"an item of type {', '.join(_ITEM_TYPES)}")
]


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


class ResponsesRequest(SharedFields):
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
    tools: Annotated[list[FlatTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    top_logprobs: Literal[0] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    include: Annotated[list[Any], Field(max_length=0)] | None = None
    reasoning: Reasoning | None = None
