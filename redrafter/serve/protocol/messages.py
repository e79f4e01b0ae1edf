"""Messages of a chat, and the tools that it may call."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, Tag
from pydantic_core import PydanticCustomError

from redrafter.serve.protocol.fields import (
    LIST,
    MOST_PARTS,
    OBJECT,
    TEXT,
    Strict,
    one_of,
    refused,
    text_or_list,
    text_or_object,
)

__all__ = ["Message", "Tool", "ToolCall", "ToolChoice", "ToolChoices"]


class Function(Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class ToolChoice(Strict):
    type: Literal["function"]
    function: FunctionName


ToolChoices = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(TEXT)] | Annotated[ToolChoice, Tag(OBJECT)],
    one_of(text_or_object, "'none', 'auto', 'required' or the name of a function as an object"),
]


class TextPart(Strict):
    type: Literal["text"]
    text: str


def _only_text(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise PydanticCustomError("unsupported", "{kind} parts cannot be read, only text", {"kind": kind})
    return part


class FunctionCall(Strict):
    """parsed_arguments: what OpenAI's client made of the arguments, which are what counts."""

    name: str
    arguments: str
    parsed_arguments: Any = None


class ToolCall(Strict):
    """index: of a call that came in a stream; the order of the list is what counts."""

    id: str
    index: int | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


_Parts = Annotated[
    list[Annotated[TextPart, BeforeValidator(_only_text)]], Field(fail_fast=True, max_length=MOST_PARTS), Tag(LIST)
]


class Message(Strict):
    """One turn. The answers of this server and of OpenAI's may be sent back as they are; parsed: what OpenAI's client
    made of the content, which is what counts."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Annotated[str, Tag(TEXT)] | _Parts, one_of(text_or_list, "a text or a list of parts")] | None = (
        None
    )
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MOST_PARTS)] | None = None
    tool_call_id: str | None = None
    parsed: Any = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    refusal: Annotated[None, refused("give it as content")] = None
    function_call: Annotated[None, refused("give tool_calls")] = None

    @property
    def text(self) -> str:
        """The content, its parts joined."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""
