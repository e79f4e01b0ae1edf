"""OpenAI's Responses requests, and how they are told as chat requests.

https://platform.openai.com/docs/api-reference/responses
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, StrictBool, Tag, ValidationError, field_validator

from redrafter.serve.protocol.fields import LIST, MOST, MOST_PARTS, TEXT, Strict, one_of, refused, text_or_list
from redrafter.serve.protocol.requests import MOST_TOOLS, ApiError, ChatRequest

__all__ = ["ResponseAnswer", "ResponsesRequest", "as_chat"]

_ITEMS = ("message", "reasoning", "function_call", "function_call_output")
_PARTS = ("input_text", "output_text", "reasoning_text", "text")
_STORED = "nothing is stored here: send the whole conversation as input"
_REFUSED = {
    "store": "store is not supported, " + _STORED,
    "previous_response_id": "previous_response_id is not supported, " + _STORED,
    "conversation": "conversation is not supported, " + _STORED,
    "prompt": "prompt is not supported, " + _STORED,
    "background": "background is not supported, " + _STORED,
    "include": "include is not supported: leave it out, or use /v1/chat/completions for logprobs",
    "max_tool_calls": "max_tool_calls is not supported: tools are called by the client",
}


class Part(Strict):
    """A part of a message's text. What the server wrote itself may be sent back as it is."""

    type: Literal["input_text", "output_text", "reasoning_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


Parts = Annotated[list[Part], Field(fail_fast=True, max_length=MOST_PARTS)]


class MessageItem(Strict):
    type: Literal["message"] = "message"
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts


class ReasoningItem(Strict):
    """Thoughts that came before what follows. There are no summaries of them here, and none that cannot be read."""

    type: Literal["reasoning"]
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    content: Parts | None = None
    summary: Annotated[list[Any], Field(max_length=0)] | None = None
    encrypted_content: Annotated[None, refused("leave it out: thoughts are sent as content")] = None


class CallItem(Strict):
    type: Literal["function_call"]
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    call_id: str
    name: str
    arguments: str


class CallOutputItem(Strict):
    type: Literal["function_call_output"]
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    call_id: str
    output: str | Parts


def _item_kind(item: Any) -> str | None:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return f"<{kind}>" if kind in _ITEMS else None


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[CallOutputItem, Tag("<function_call_output>")],
    one_of(_item_kind, f"an item of type {', '.join(_ITEMS)}"),
]
Items = Annotated[list[Item], Field(fail_fast=True, min_length=1, max_length=MOST_PARTS), Tag(LIST)]


class FlatTool(Strict):
    """A function, in the flat shape of the Responses protocol."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class FlatToolChoice(Strict):
    type: Literal["function"]
    name: str


class TextFormat(Strict):
    """`json_schema` stands flat beside its name here."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: StrictBool | None = None


class TextConfig(Strict):
    format: TextFormat | None = None
    verbosity: None = None


class Reasoning(Strict):
    """How much to think, where the chat template reads that."""

    effort: str | None = None
    summary: Annotated[None, refused("leave it out: thoughts are told as they are")] = None
    generate_summary: Annotated[None, refused("leave it out: thoughts are told as they are")] = None


class ResponseStreamOptions(Strict):
    include_obfuscation: Literal[False] = False


class ResponsesRequest(Strict):
    """`POST /v1/responses`. Behind OpenAI's fields, some that `/v1/chat/completions` takes too."""

    input: Annotated[Annotated[str, Tag(TEXT)] | Items, one_of(text_or_list, "a text or a list of items")]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(strict=True, ge=1, le=MOST)] | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: StrictBool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    stream: StrictBool | None = None
    stream_options: ResponseStreamOptions | None = None
    temperature: Annotated[float, Field(strict=True, ge=0, le=2)] | None = None
    text: TextConfig | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatToolChoice | None = None
    tools: Annotated[list[FlatTool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    top_logprobs: Literal[0] | None = None
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] | None = None
    truncation: Literal["disabled"] | None = None
    user: str | None = None
    background: Literal[False] | None = None
    conversation: None = None
    include: Annotated[list[str], Field(max_length=0)] | None = None
    max_tool_calls: None = None
    previous_response_id: None = None
    prompt: None = None
    reasoning: Reasoning | None = None

    seed: Annotated[int, Field(strict=True, ge=0, lt=1 << 62)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1, le=MOST)] | None = None
    min_p: Annotated[float, Field(strict=True, ge=0, le=1)] | None = None
    ignore_eos: StrictBool = False

    @field_validator(*_REFUSED, mode="before")
    @classmethod
    def _supported(cls, value: Any, info: Any) -> Any:
        if value is not None and value is not False and value != []:
            raise ApiError(400, _REFUSED[info.field_name], info.field_name, "unsupported_parameter")
        return value

    @field_validator("input", mode="before")
    @classmethod
    def _known_items(cls, value: Any) -> Any:
        for item in _objects(value):
            _check_type("input items", item.get("type", "message"), _ITEMS)
            for part in _objects(item.get("content")):
                _check_type("content parts", part.get("type"), _PARTS)
        return value

    @field_validator("tools", mode="before")
    @classmethod
    def _functions(cls, value: Any) -> Any:
        for tool in _objects(value):
            if isinstance(kind := tool.get("type"), str) and kind != "function":
                raise ApiError(400, f"tools of type {kind!r} are not run here; give type function", "tools")
        return value


def _objects(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _check_type(what: str, kind: Any, known: Sequence[str]) -> None:
    """Refuse a type by its name: of a union, an error would name every type that it is not."""
    if isinstance(kind, str) and kind not in known:
        raise ApiError(400, f"{what} of type {kind!r} are not read here; {', '.join(known)} are", "input")


class ResponseAnswer(BaseModel):
    """What `/v1/responses` answers, in its main parts."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


def as_chat(request: ResponsesRequest) -> ChatRequest:
    """Return the same request as the chat route reads it. Raises `RequestValidationError` where that refuses it."""
    same = ("model", "parallel_tool_calls", "service_tier", "temperature", "top_p", "user", "seed", "top_k", "min_p")
    found: dict[str, Any] = {name: getattr(request, name) for name in same}
    found |= {"messages": _messages(request), "max_completion_tokens": request.max_output_tokens}
    found |= {"ignore_eos": request.ignore_eos, "stream": request.stream}
    if request.reasoning is not None:
        found["reasoning_effort"] = request.reasoning.effort
    if request.stream:
        found["stream_options"] = {"include_usage": True}
    if request.tools:
        found["tools"] = [{"type": "function", "function": _function(tool)} for tool in request.tools]
    choice = request.tool_choice
    named = isinstance(choice, FlatToolChoice)
    found["tool_choice"] = {"type": "function", "function": {"name": choice.name}} if named else choice  # type: ignore[union-attr]
    if request.text is not None and request.text.format is not None:
        found["response_format"] = _format(request.text.format)
    try:
        return ChatRequest.model_validate(found)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error


def _function(tool: FlatTool) -> dict[str, Any]:
    return tool.model_dump(exclude={"type"}, exclude_none=True)


def _format(asked: TextFormat) -> dict[str, Any]:
    if asked.type != "json_schema":
        return {"type": asked.type}
    if asked.schema_ is None:
        raise ApiError(400, "text.format of type json_schema needs a schema", "text.format.schema")
    schema = {"name": asked.name or "schema", "schema": asked.schema_, "strict": asked.strict}
    return {"type": "json_schema", "json_schema": schema}


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Return chat messages. Thoughts, a text of the assistant and calls that follow each other become one message."""
    found: list[dict[str, Any]] = []
    if request.instructions is not None:
        found.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*found, {"role": "user", "content": request.input}]
    for item in request.input:
        if isinstance(item, ReasoningItem):
            found.append({"role": "assistant", "content": None, "reasoning_content": _text(item.content or [])})
        elif isinstance(item, CallItem):
            call = {"id": item.call_id, "type": "function"}
            call["function"] = {"name": item.name, "arguments": item.arguments}  # type: ignore[assignment]
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": None})
            found[-1].setdefault("tool_calls", []).append(call)
        elif isinstance(item, CallOutputItem):
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif item.role == "assistant" and found and _only_thoughts(found[-1]):
            found[-1]["content"] = _text(item.content)
        else:
            found.append({"role": item.role, "content": _text(item.content)})
    return found


def _only_thoughts(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" and message["content"] is None and "tool_calls" not in message


def _text(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
