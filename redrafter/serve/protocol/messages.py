"""Messages of a chat request, and the tools that the model may call."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, Tag
from pydantic_core import PydanticCustomError

from redrafter.serve.protocol.fields import (
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

__all__ = ["Message", "Tool", "ToolCall", "ToolChoice", "ToolChoices"]


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


def _check_is_text(part: Any) -> Any:
    """Refuse parts of other types than text by name."""
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise PydanticCustomError("unsupported", "{kind} parts cannot be read, only text", {"kind": kind})
    return part


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


_Parts = Annotated[
    list[Annotated[TextPart, BeforeValidator(_check_is_text)]],
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

    @property
    def text(self) -> str:
        """The content as one text, parts joined; empty where there is none."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""
