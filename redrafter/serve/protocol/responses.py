"""OpenAI's Responses requests and answers.

https://platform.openai.com/docs/api-reference/responses
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StrictBool, Tag, field_validator

from redrafter.serve.protocol.fields import (
    IMAGE_TAG,
    LIST_TAG,
    MAX_PARTS,
    TEXT_TAG,
    Count,
    Labels,
    Strict,
    one_of,
    refuse_with,
    tag_text_or_list,
)
from redrafter.serve.protocol.requests import MAX_TOOLS, ApiError, DataUrl, SharedFields

_ITEM_TYPES = ("message", "reasoning", "function_call", "function_call_output")
_PART_TYPES = ("input_text", "input_image", "output_text", "reasoning_text", "text")
_NOTHING_STORED = "nothing is stored here: send the whole conversation as input"
_REFUSALS = {
    "store": "store is not supported, " + _NOTHING_STORED,
    "previous_response_id": "previous_response_id is not supported, " + _NOTHING_STORED,
    "conversation": "conversation is not supported, " + _NOTHING_STORED,
    "prompt": "prompt is not supported, " + _NOTHING_STORED,
    "background": "background is not supported, " + _NOTHING_STORED,
    "include": "include is not supported: leave it out, or use /v1/chat/completions for logprobs",
    "max_tool_calls": "max_tool_calls is not supported: tools are called by the client",
}


class Part(Strict):
    """A text part of a message. Parts that the server wrote may be sent back as they are."""

    type: Literal["input_text", "output_text", "reasoning_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


Parts = Annotated[list[Part], Field(fail_fast=True, max_length=MAX_PARTS)]


class InputImage(Strict):
    """An image as a part of a message of the user.

    Attributes:
        image_url: A `data:` URL in base64.
        detail: How closely to look at it; the model's processor decides that alone.
    """

    type: Literal["input_image"]
    file_id: Annotated[None, refuse_with("send the image itself, as image_url")] = None
    image_url: DataUrl
    detail: Literal["auto"] = "auto"


def _part_tag(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return IMAGE_TAG if kind == "input_image" else TEXT_TAG


PartsWithImages = Annotated[
    list[
        Annotated[
            Annotated[Part, Tag(TEXT_TAG)] | Annotated[InputImage, Tag(IMAGE_TAG)],
            one_of(_part_tag, "a part of text or an image"),
        ]
    ],
    Field(fail_fast=True, max_length=MAX_PARTS),
    Tag(LIST_TAG),
]


class _Item(Strict):
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(_Item):
    """A message of the input."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Tag(TEXT_TAG)] | PartsWithImages, one_of(tag_text_or_list, "a text or a list of parts")
    ]


class ReasoningItem(_Item):
    """Thoughts of the assistant before the items that follow. Summaries and encrypted thoughts are refused."""

    type: Literal["reasoning"]
    content: Parts | None = None
    summary: Annotated[list[Any], Field(max_length=0)] | None = None
    encrypted_content: Annotated[None, refuse_with("leave it out: thoughts are sent as content")] = None


class CallItem(_Item):
    """A call that the model has made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(_Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts


def _item_tag(item: Any) -> str | None:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return f"<{kind}>" if kind in _ITEM_TYPES else None


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[CallOutputItem, Tag("<function_call_output>")],
    one_of(_item_tag, f"an item of type {', '.join(_ITEM_TYPES)}"),
]
Items = Annotated[list[Item], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS), Tag(LIST_TAG)]


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
    """Format of the answer's text; a JSON schema has its fields beside `type` here."""

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
    """How much to think. The effort goes to the chat template, if it reads one."""

    effort: str | None = None
    summary: Annotated[None, refuse_with("leave it out: thoughts are told as they are")] = None
    generate_summary: Annotated[None, refuse_with("leave it out: thoughts are told as they are")] = None


class ResponseStreamOptions(Strict):
    """Options of a streamed answer."""

    include_obfuscation: Literal[False] = False


class ResponsesRequest(SharedFields):
    """Body of `POST /v1/responses`: fields of OpenAI, then some that `/v1/chat/completions` takes too."""

    input: Annotated[Annotated[str, Tag(TEXT_TAG)] | Items, one_of(tag_text_or_list, "a text or a list of items")]
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
    conversation: None = None
    include: Annotated[list[str], Field(max_length=0)] | None = None
    max_tool_calls: None = None
    previous_response_id: None = None
    prompt: None = None
    reasoning: Reasoning | None = None

    @field_validator(*_REFUSALS, mode="before")
    @classmethod
    def _check_supported(cls, value: Any, info: Any) -> Any:
        if value is not None and value is not False and value != []:
            raise ApiError(400, _REFUSALS[info.field_name], info.field_name, "unsupported_parameter")
        return value

    @field_validator("input", mode="before")
    @classmethod
    def _check_items(cls, value: Any) -> Any:
        for item in _objects(value):
            _check_type("input items", item.get("type", "message"), _ITEM_TYPES)
            for part in _objects(item.get("content")):
                _check_type("content parts", part.get("type"), _PART_TYPES)
        return value

    @field_validator("tools", mode="before")
    @classmethod
    def _check_tools(cls, value: Any) -> Any:
        for tool in _objects(value):
            if isinstance(kind := tool.get("type"), str) and kind != "function":
                raise ApiError(400, f"tools of type {kind!r} are not run here; give type function", "tools")
        return value


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _check_type(what: str, kind: Any, known: Sequence[str]) -> None:
    """Refuse an unknown type by name. The error of a union would list every type that it is not."""
    if isinstance(kind, str) and kind not in known:
        raise ApiError(400, f"{what} of type {kind!r} are not read here; {', '.join(known)} are", "input")


class ResponseAnswer(BaseModel):
    """Answer of `/v1/responses`, described in its main fields."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
