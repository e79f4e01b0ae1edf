"""Messages of a chat request, and the tools that the model may call."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, Tag, model_validator
from pydantic_core import PydanticCustomError

from redrafter.serve.protocol.fields import (
    IMAGE_TAG,
    LIST_TAG,
    MAX_PARTS,
    OBJECT_TAG,
    TEXT_TAG,
    Strict,
    one_of,
    refuse_with,
    tag_text_or_list,
    tag_text_or_object,
)

__all__ = ["DATA_URL", "DataUrl", "ImagePart", "Message", "TextPart", "Tool", "ToolCall", "ToolChoice", "ToolChoices"]

DATA_URL = re.compile(r"data:image/[a-z0-9.+-]+;base64,", re.IGNORECASE)


class Function(Strict):
    """Definition of a function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    """Name of the function that must be called."""

    name: str


class ToolChoice(Strict):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


ToolChoices = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(TEXT_TAG)] | Annotated[ToolChoice, Tag(OBJECT_TAG)],
    one_of(tag_text_or_object, "'none', 'auto', 'required' or the name of a function as an object"),
]


class TextPart(Strict):
    """A text part of a message's content."""

    type: Literal["text"]
    text: str


def _check_url(url: Any) -> Any:
    """Refuse addresses, which the server would have to fetch, before anything else."""
    if isinstance(url, str) and not DATA_URL.match(url):
        raise PydanticCustomError(
            "unsupported", "this server fetches nothing: send the image itself, as data:image/png;base64,..."
        )
    return url


DataUrl = Annotated[str, BeforeValidator(_check_url)]
"""An image as a `data:` URL in base64."""


class ImageUrl(Strict):
    """An image within a URL.

    Attributes:
        url: A `data:` URL in base64.
        detail: How closely to look at it; the model's processor decides that alone.
    """

    url: DataUrl
    detail: Literal["auto"] = "auto"


class ImagePart(Strict):
    """An image as a part of a message's content."""

    type: Literal["image_url"]
    image_url: ImageUrl


def _check_part(part: Any) -> Any:
    """Refuse parts of other types than text and images by name."""
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in ("text", "image_url"):
        raise PydanticCustomError("unsupported", "{kind} parts cannot be read, only text and images", {"kind": kind})
    return part


def _tag_part(part: Any) -> str | None:
    """Return the tag of a part of a message, which may be a pydantic model already; None for other values."""
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    if kind == "image_url":
        return IMAGE_TAG
    return TEXT_TAG if isinstance(part, dict | TextPart) else None


class FunctionCall(Strict):
    """A function that the model has called.

    Attributes:
        name: Name of the function.
        arguments: Arguments as JSON.
        parsed_arguments: What OpenAI's client parsed of the arguments; ignored.
    """

    name: str
    arguments: str
    parsed_arguments: Any = None


class ToolCall(Strict):
    """A call that the model has made.

    Attributes:
        id: Id of the call, which its answer refers to.
        index: Index of a call that came in a stream; ignored, for the order of the list counts.
        type: Kind of tool.
        function: The function and its arguments.
    """

    id: str
    index: int | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


_Part = Annotated[
    Annotated[TextPart, Tag(TEXT_TAG)] | Annotated[ImagePart, Tag(IMAGE_TAG)],
    one_of(_tag_part, "a part of text or an image"),
    BeforeValidator(_check_part),
]
_Parts = Annotated[
    list[_Part],
    Field(fail_fast=True, max_length=MAX_PARTS),
    Tag(LIST_TAG),
]


class Message(Strict):
    """One message of a chat. Messages of this server and of OpenAI's may be sent back as they are.

    `parsed`, which OpenAI's client makes of the content, is ignored.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[Annotated[str, Tag(TEXT_TAG)] | _Parts, one_of(tag_text_or_list, "a text or a list of parts")] | None
    ) = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    tool_call_id: str | None = None
    parsed: Any = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    refusal: Annotated[None, refuse_with("give it as content")] = None
    function_call: Annotated[None, refuse_with("give tool_calls")] = None

    @model_validator(mode="after")
    def _check_images(self) -> "Message":
        if self.images and self.role != "user":
            raise ValueError("images are read in messages of the user alone")
        return self

    @property
    def text(self) -> str:
        """The content as one text, parts joined and images left out; empty where there is none."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def parts(self) -> "list[TextPart | ImagePart]":
        """The content as parts; none where there is none."""
        if isinstance(self.content, str):
            return [TextPart(type="text", text=self.content)]
        return self.content or []

    @property
    def images(self) -> list[str]:
        """The `data:` URLs of its images, in their order."""
        return [part.image_url.url for part in self.parts if isinstance(part, ImagePart)]
